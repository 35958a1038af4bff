"use strict";
// The pointer is told of the point next to it, and of those of other lines within TOGETHER of that: [x, y, text, line] in
// the units of the picture, as TOGETHER is.
const TOGETHER = 2;
for (const chart of document.querySelectorAll(".chart")) {
  const svg = chart.querySelector("svg"), tip = chart.querySelector(".tip"), here = svg.querySelector(".here");
  const points = JSON.parse(svg.dataset.points), lines = svg.querySelectorAll(".line");
  const show = event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = scale * (event.clientX - box.left), y = scale * (event.clientY - box.top);
    let next = null, least = Infinity;
    for (const point of points) {
      const distance = Math.hypot(point[0] - x, point[1] - y);
      if (distance < least) { least = distance; next = point; }
    }
    if (!next) return;
    here.setAttribute("cx", next[0]); here.setAttribute("cy", next[1]);
    here.setAttribute("class", `here ${lines[next[3]].classList[1]}`); here.setAttribute("visibility", "visible");
    const told = new Map();
    for (const [px, py, text, line] of points)
      if (Math.hypot(px - next[0], py - next[1]) < TOGETHER && !told.has(line)) told.set(line, text);
    told.set(next[3], next[2]);
    tip.textContent = [...told.values()].join("\n"); tip.hidden = false;
    const around = chart.getBoundingClientRect();
    const left = box.left - around.left + next[0] / scale, above = box.top - around.top + next[1] / scale;
    tip.style.left = `${Math.max(0, Math.min(left + 8, chart.clientWidth - tip.offsetWidth))}px`;
    const top = above - tip.offsetHeight - 8;
    tip.style.top = `${top < 0 ? above + 8 : top}px`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; here.setAttribute("visibility", "hidden"); });
}
