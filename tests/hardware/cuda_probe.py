"""List the GPUs of a CUDA program by UUID, with memory allocated on each. Exits 1 without any.

It takes `TAKE_MIB` of the environment, and keeps it for `HOLD` seconds.

Only the driver's own library is used (https://docs.nvidia.com/cuda/cuda-driver-api/), so that this
runs wherever the driver is.
"""

import ctypes
import os
import sys
import time
import uuid

TAKEN_MIB = int(os.environ.get("TAKE_MIB", "256"))


def main() -> int:
    """Print what is seen."""
    cuda = ctypes.CDLL("libcuda.so.1")
    if status := cuda.cuInit(0):
        print(f"cuInit: error {status}")
        return 1
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for ordinal in range(count.value):
        name, raw = ctypes.create_string_buffer(96), (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGetName(name, 96, ordinal)
        cuda.cuDeviceGetUuid_v2(raw, ordinal)
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal)
        cuda.cuCtxSetCurrent(context)
        taken = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(TAKEN_MIB << 20))
        threads = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(threads), 16, ordinal)  # MULTIPROCESSOR_COUNT
        seen = f"GPU-{uuid.UUID(bytes=bytes(raw))} {name.value.decode()}"
        print(f"{seen}, {threads.value} multiprocessors, {TAKEN_MIB} MiB: error {taken}")
        if taken:
            return 1
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    print(f"{count.value} GPUs" + (f", MPS share {share}%" if share else ""))
    time.sleep(float(os.environ.get("HOLD", "0")))
    return 0 if count.value else 1


if __name__ == "__main__":
    sys.exit(main())
