"""NVIDIA GPUs in the states of the field, over the substitute of `native/nvml.c`."""

from pathlib import Path
from typing import ClassVar

from plugins.field.rig import add_to_bus

IDS = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")
VENDOR = "10de"
LOST, NO_PERMISSION, NOT_SUPPORTED, UNKNOWN = 15, 4, 3, 999
STATE_CALLS = (
    "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode",
    "nvmlDeviceGetName", "nvmlDeviceGetFieldValues", "nvmlDeviceGetMinorNumber",
)  # fmt: skip


def gpu(index: int, **fields: object) -> str:
    """Return a line of the substitute's file; `name` comes last."""
    values = {
        "uuid": IDS[index] if index < len(IDS) else f"GPU-{index}",
        "pci": f"00000000:0{index}:00.0",
        "recovery": 0,
        "events": 8,
        "minor": index,
        "name": "NVIDIA H100",
        **fields,
    }
    values["name"] = values.pop("name")
    return "gpu " + " ".join(f"{key}={value}" for key, value in values.items())


def fails(code: int, *functions: str, gpu: int | str = "") -> list[str]:
    return [f"fail {function} {code} {gpu}" for function in functions]


class NvidiaRig:
    """Three whole GPUs on the PCI bus."""

    name = "cuda"
    target = "agentd_cuda:CudaPlugin"
    stable_ids = IDS
    words: ClassVar = {
        "lost": "GPU is lost",
        "lost behind its handle": "GPU is lost",
        "identity alone": "Unknown Error",
        "no permission": "Insufficient Permissions",
        "missing in the driver": "0000:01:00.0",
        "replaced": "",
        "not on PCI": "",
    }

    def __init__(self, folder: Path, monkeypatch, library: Path) -> None:
        self.file = folder / "gpus"
        self.sysfs = folder / "sys"
        self.settings = {"sysfs": str(self.sysfs)}
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
        monkeypatch.setenv("FAKE_NVML_FILE", str(self.file))
        for index in range(len(IDS)):
            add_to_bus(self.sysfs, f"0000:0{index}:00.0", VENDOR, "nvidia")
        self.bring()

    def say(self, *lines: str) -> None:
        """Replace the GPUs and failures of the driver."""
        new = self.file.with_suffix(".new")
        text = "\n".join(("driver 580.65.06", "init 0", *lines, ""))
        new.write_bytes(text.encode(errors="surrogateescape"))
        new.replace(self.file)

    def bring(self, state: str = "") -> None:
        first, second, third = gpu(0), gpu(1), gpu(2)
        self.say(*{
            "": (first, second, third),
            "lost": (first, gpu(1, lost=1), third),
            "lost behind its handle": (first, gpu(1, lost=2), third),
            "identity alone": (first, second, third, *fails(UNKNOWN, *STATE_CALLS, gpu=1)),
            "no permission": (
                first, second, third,
                *fails(NO_PERMISSION, "nvmlDeviceGetHandleByIndex_v2", gpu=1),
            ),
            "missing in the driver": (first, third),
            "replaced": (first, gpu(1, uuid="GPU-new"), third),
            "not on PCI": (
                first, second, third,
                *fails(NOT_SUPPORTED, "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMinorNumber", gpu=1),
            ),
        }[state])  # fmt: skip
