"use strict";
// The pointer is told of the point next to it, and of those of other lines that lie on that: [x, y, text, line], x and y
// in the units of the picture.
for (const chart of document.querySelectorAll(".chart")) {
  const svg = chart.querySelector("svg"), tip = chart.querySelector(".tip"), here = svg.querySelector(".here");
  const points = JSON.parse(svg.dataset.points);
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
    here.setAttribute("class", `here c${next[3] % 8}`); here.setAttribute("visibility", "visible");
    const found = points.filter(point => point === next || point[3] !== next[3] && Math.hypot(point[0] - next[0], point[1] - next[1]) < 2);
    tip.textContent = [...new Map(found.map(point => [point[3], point[2]])).values()].join("\n"); tip.hidden = false;
    const left = svg.offsetLeft + next[0] / scale, above = svg.offsetTop + next[1] / scale;
    tip.style.left = `${Math.max(0, Math.min(left + 8, chart.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, above - tip.offsetHeight - 8)}px`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; here.setAttribute("visibility", "hidden"); });
}
