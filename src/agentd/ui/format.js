// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(number) {
  if (number === null || number === undefined) return "–";
  let size = number;
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${UNITS[unit]}`;
}

export function amount(text, kind) {
  if (kind === "bytes") return bytes(Number(text));
  const number = Number(text);
  return Number.isInteger(number) ? String(number) : String(Number(number.toFixed(3)));
}

export const percent = (part) => (part === null || part === undefined ? "–" : `${Math.round(part * 100)} %`);

export const cores = (number) => (number === null || number === undefined ? "–" : number.toFixed(number < 10 ? 2 : 1));

export function age(text, now = Date.now()) {
  if (!text) return "–";
  const seconds = Math.max(0, Math.round((now - Date.parse(text)) / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}
