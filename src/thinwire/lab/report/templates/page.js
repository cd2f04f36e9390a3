// Unpacks plotly, draws every figure in the page's own colours, and sorts tables. Nothing is fetched.
(async () => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;

  async function unpack(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  function coloured(spec) {
    const night = dark.matches && !printing;
    const ink = night ? "#e6e9ec" : "#1f2328";
    const grid = night ? "#343a40" : "#e3e7eb";
    const layout = structuredClone(spec.layout);
    layout.font.color = ink;
    for (const name of Object.keys(layout).filter((each) => /^[xy]axis/.test(each))) {
      Object.assign(layout[name], { gridcolor: grid, linecolor: grid, tickcolor: grid });
    }
    layout.hoverlabel = { bgcolor: night ? "#1f2429" : "#ffffff", bordercolor: grid, font: { color: ink }, align: "left" };
    const data = structuredClone(spec.data);
    for (const trace of data.filter((each) => each.meta === "ink")) {
      trace.line.color = ink;
      trace.marker.color = ink;
    }
    return [data, layout];
  }

  function draw(figure) {
    return Plotly.react(figure.plot, ...coloured(figure.spec), { displayModeBar: false, responsive: true });
  }

  function toggled(button, figure) {
    const axis = figure.spec.layout.xaxis;
    const show = () => button.setAttribute("aria-pressed", axis.type === "log");
    button.hidden = false;
    button.addEventListener("click", () => {
      axis.type = axis.type === "log" ? "linear" : "log";
      show();
      draw(figure);
    });
    show();
  }

  function sortable(table) {
    const body = table.tBodies[0];
    table.tHead.querySelectorAll("th").forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const rising = head.getAttribute("aria-sort") !== "ascending";
        table.tHead.querySelectorAll("th[aria-sort]").forEach((each) => each.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", rising ? "ascending" : "descending");
        body.append(...[...body.rows].sort((a, b) => order(a, b, column, rising)));
      });
    });
  }

  function order(a, b, column, rising) {
    const [first, second] = [a, b].map((row) => row.cells[column]?.dataset.value ?? "");
    if (first === "" || second === "") return (first === "") - (second === ""); // what is not known goes last
    const apart = isNaN(first) || isNaN(second) ? first.localeCompare(second) : first - second;
    return rising ? apart : -apart;
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  if (!("DecompressionStream" in window)) {
    document.querySelectorAll(".plot").forEach((plot) => (plot.textContent = "The figures need a newer browser."));
    return;
  }
  await unpack("plotly");
  const figures = [...document.querySelectorAll("figure")].map((figure) => ({
    plot: figure.querySelector(".plot"),
    spec: JSON.parse(figure.querySelector("script").textContent),
    button: figure.querySelector("button.axis"),
  }));
  for (const figure of figures) {
    await draw(figure);
    if (figure.button) toggled(figure.button, figure);
  }
  const again = (now) => {
    printing = now;
    figures.forEach(draw);
  };
  dark.addEventListener("change", () => again(false));
  addEventListener("beforeprint", () => again(true));
  addEventListener("afterprint", () => again(false));
})();
