// Text of a model to elements: the part of Markdown that models write. It makes nodes, never HTML, so that nothing in
// an answer can become a script.

// Lengths are bounded, so that no text takes long.
const INLINE = new RegExp(
  [
    /(`{1,4})(.{1,2000}?)\1/,
    /\*\*(.{1,2000}?)\*\*/,
    /(?<![\w*])\*(?!\s)([^*]{1,2000}?)\*(?!\w)/,
    /\[([^\]]{1,500})\]\((https?:\/\/[^\s)]{1,2000})\)/,
  ]
    .map((part) => part.source)
    .join("|"),
  "su",
);
const DEEPEST = 8; // quotes in quotes

function make(tag, ...children) {
  const element = document.createElement(tag);
  element.append(...children);
  return element;
}

function inline(text) {
  const nodes = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    nodes.push(text.slice(0, found.index));
    const [, , code, bold, italic, label, address] = found;
    if (code !== undefined) nodes.push(make("code", code));
    else if (bold !== undefined) nodes.push(make("strong", ...inline(bold)));
    else if (italic !== undefined) nodes.push(make("em", ...inline(italic)));
    else {
      const link = make("a", label);
      link.href = address;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      nodes.push(link);
    }
  }
  return [...nodes, text];
}

const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/;
const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const ROW = /^\s*\|.*\|\s*$/;

function code(lines, fence) {
  const kept = [];
  while (lines.length && !lines[0].trimStart().startsWith(fence[1])) kept.push(lines.shift());
  lines.shift();
  const block = make("pre", make("code", kept.join("\n")));
  block.tabIndex = 0; // wide code scrolls, also by keys
  if (fence[2]) block.dataset.language = fence[2];
  return block;
}

function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const items = make(ordered ? "ol" : "ul");
  if (ordered) items.start = parseInt(mark, 10);
  for (let found; lines.length && (found = ITEM.exec(lines[0])); ) {
    if (found[1].length < indent.length) break;
    if (found[1].length > indent.length + 1) items.lastChild.append(list(lines));
    else if (/\d/.test(found[2]) !== ordered) break;
    else {
      lines.shift();
      const own = [found[3]];
      while (lines.length && /^\s+\S/.test(lines[0]) && !ITEM.test(lines[0]) && !FENCE.test(lines[0])) {
        own.push(lines.shift().trim());
      }
      items.append(make("li", ...inline(own.join("\n"))));
    }
  }
  return items;
}

function table(lines) {
  const cells = (line) => line.trim().slice(1, -1).split("|").map((cell) => cell.trim());
  const head = make("tr", ...cells(lines.shift()).map((cell) => make("th", ...inline(cell))));
  lines.shift();
  const body = make("tbody");
  while (lines.length && ROW.test(lines[0])) {
    body.append(make("tr", ...cells(lines.shift()).map((cell) => make("td", ...inline(cell)))));
  }
  return make("table", make("thead", head), body);
}

function quote(lines, depth) {
  const own = [];
  while (lines.length && lines[0].startsWith(">")) own.push(lines.shift().replace(/^> ?/, ""));
  return make("blockquote", ...render(own.join("\n"), depth + 1));
}

function paragraph(lines) {
  const own = [lines.shift()];
  while (lines.length && lines[0].trim() && !ITEM.test(lines[0]) && !FENCE.test(lines[0])) own.push(lines.shift());
  const paragraph = make("p", ...inline(own.join("\n")));
  paragraph.style.whiteSpace = "pre-wrap";
  return paragraph;
}

// Returns the elements of a text.
export function render(text, depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  while (lines.length) {
    const heading = /^(#{1,6})\s+(.*)$/.exec(lines[0]);
    const fence = FENCE.exec(lines[0]);
    if (!lines[0].trim()) lines.shift();
    else if (fence) {
      lines.shift();
      blocks.push(code(lines, fence));
    } else if (heading) {
      lines.shift();
      // The page has h1 and h2 of its own.
      blocks.push(make(`h${Math.min(heading[1].length + 2, 6)}`, ...inline(heading[2])));
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(lines[0])) {
      lines.shift();
      blocks.push(make("hr"));
    } else if (ITEM.test(lines[0])) blocks.push(list(lines));
    else if (ROW.test(lines[0]) && /^\s*\|[\s|:-]+\|\s*$/.test(lines[1] ?? "")) blocks.push(table(lines));
    else if (lines[0].startsWith(">") && depth < DEEPEST) blocks.push(quote(lines, depth));
    else blocks.push(paragraph(lines));
  }
  return blocks;
}
