// Small curves.

import { POINTS } from "./store.js";

/** Draw points, the newest at the right edge, from 0 to `most` (or the highest of them). */
export function draw(canvas, points, minimumTop) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  if (canvas.width !== Math.round(width * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const values = points.filter((point) => point !== null);
  if (!values.length) return;
  const top = Math.max(minimumTop ?? 0, ...values) || 1;
  const style = getComputedStyle(canvas);
  const step = width / (POINTS - 1);
  const x = (index) => width - (points.length - 1 - index) * step;
  const y = (point) => height - 1 - (point / top) * (height - 2);
  context.strokeStyle = style.color;
  context.fillStyle = style.color;
  context.lineWidth = 1.5;
  let start = null;
  const closeArea = (index) => {
    context.stroke();
    context.lineTo(x(index), height);
    context.lineTo(x(start), height);
    context.globalAlpha = 0.15;
    context.fill();
    context.globalAlpha = 1;
    start = null;
  };
  points.forEach((point, index) => {
    if (point === null) {
      if (start !== null) closeArea(index - 1);
    } else if (start === null) {
      start = index;
      context.beginPath();
      context.moveTo(x(index), y(point));
    } else {
      context.lineTo(x(index), y(point));
    }
  });
  if (start !== null) closeArea(points.length - 1);
}
