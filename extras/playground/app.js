// Draws what `view` of app.py says into gradio's `element`. Clicks: on a blank "select", on a token
// that fits "click". All text goes through textContent.

function add(parent, tag, name = "", text = "") {
  const node = parent.appendChild(document.createElement(tag));
  node.className = name;
  node.textContent = text;
  return node;
}

const plain = (text) => text.replaceAll(" ", "·").replaceAll("\n", "⏎");
const percent = (p, digits = 1) => `${(100 * p).toFixed(digits)}%`;

function drawText(parent, view, tag) {
  const text = add(parent, "div", "filling");
  for (const token of view.tokens) {
    if (token.blank !== undefined) {
      const node = add(text, tag, token.next ? "blank next" : "blank", `${plain(token.text)} `);
      add(node, "small", "", percent(token.p, 0));
      node.onclick = () => tag === "button" && trigger("select", { value: [token.blank, -1] });
    } else if (token.step) {
      const node = add(text, "span", "filled", token.text);
      node.style.setProperty("--p", token.p);
      node.title = `token ${token.step}: probability ${percent(token.p)}, log p ${Math.log(token.p).toFixed(2)}`;
    } else {
      add(text, "span", "", token.text);
    }
  }
  const blanks = view.tokens.filter((token) => token.blank !== undefined).length;
  const filled = view.sums.length - 1;
  const rows = [[`${filled} of ${filled + blanks} tokens`, "log p (nats)", "per token"]];
  for (const [name, sum, count] of view.scores)
    rows.push([name, sum.toFixed(2), (sum / Math.max(1, count)).toFixed(2)]);
  const table = add(parent, "table", "scores");
  for (const cells of rows) {
    const row = add(table, "tr");
    for (const cell of cells) add(row, cells === rows[0] ? "th" : "td", "", cell);
  }
}

function drawChoices(parent, view) {
  add(parent, "h4", "", "What fits into the outlined blank");
  const open = view.tokens.some((token) => token.blank !== undefined);
  if (!view.choices.length) add(parent, "p", "", open ? "Click a blank." : "No blank is left. Run draws again, Undo takes the last token back, Restart all of them.");
  for (const [position, token, text, p] of view.choices) {
    const node = add(parent, "button", "choice");
    add(node, "b", "", plain(text));
    add(node, "i").style.width = percent(p);
    add(node, "span", "", percent(p));
    node.onclick = () => trigger("click", { value: [position, token] });
  }
}

function drawSums(parent, views) {
  add(parent, "h4", "", "log p (nats) as tokens are filled in");
  const [width, height, left, low] = [420, 190, 44, 24];
  const svg = (node, tag, attributes, text = "") => {
    const made = node.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  };
  const picture = svg(parent, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const first = views[0];
  const count = Math.max(1, first.sums.length - 1 + first.tokens.filter((t) => t.blank !== undefined).length);
  const least = Math.min(-1, ...views.flatMap((view) => view.sums));
  const x = (i) => left + (i / count) * (width - left - 12);
  const y = (sum) => 12 + (sum / least) * (height - low - 16);
  for (const sum of [0, least / 2, least]) {
    svg(picture, "line", { x1: left, x2: width - 12, y1: y(sum), y2: y(sum), class: "grid" });
    svg(picture, "text", { x: left - 6, y: y(sum) + 4, "text-anchor": "end" }, sum.toFixed(1));
  }
  svg(picture, "text", { x: left, y: height - 4 }, "0");
  svg(picture, "text", { x: x(count), y: height - 4, "text-anchor": "end" }, `${count} tokens`);
  views.forEach((view, number) => {
    const points = view.sums.map((sum, i) => `${x(i)},${y(sum)}`).join(" ");
    svg(picture, "polyline", { points, class: `curve${number}` });
    view.sums.forEach((sum, i) => {
      const dot = svg(picture, "circle", { cx: x(i), cy: y(sum), r: 3, class: `curve${number}` });
      svg(dot, "title", {}, `${i} tokens: log p ${sum.toFixed(2)}`);
    });
  });
}

function draw() {
  const { error, views = [] } = props.value || {};
  element.replaceChildren();
  if (error) add(element, "p", "error", error).setAttribute("role", "status");
  if (!views.length) return;
  const texts = add(element, "div", "columns");
  views.forEach((view, number) => {
    const column = add(texts, "section");
    if (views.length > 1) add(column, "h4", `curve${number}`, ["This order", "Beside"][number]);
    drawText(column, view, number ? "span" : "button");
  });
  const legend =
    "Dashed: a blank, with its likeliest token and how probable that is (· is a space). " +
    "Outlined: it comes next. Green: filled in; the darker, the more probable.";
  add(element, "p", "legend", legend);
  const below = add(element, "div", "columns");
  drawChoices(add(below, "section"), views[0]);
  drawSums(add(below, "section"), views);
}

watch("value", draw);
draw();
