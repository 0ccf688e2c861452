// ---- Start -----------------------------------------------------------------------------------------------------

function start() {
  document.documentElement.classList.add("script");
  if (N < data.tree.of) {
    byId("left-out").textContent = `The chart shows the ${count(N)} nodes with the largest subtrees of ${count(data.tree.of)}.`;
  }
  if (!rolesKnown) byId("colour").querySelector("[value=role]").remove();
  byId("colour").value = view.colourMode;
  setZoom(NONE);
  buildPalette();
  listenToChart();
  listenToSearch();
  sayFound();
  resize();
  showPanel(view.selected);
  showHistograms();
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}
start();
