// -- markdown ------------------------------------------------------------------------------------
// Paragraphs, headings, lists, code, bold and italics, which models write most. A model's text becomes
// text nodes only, never HTML. `mark(from, to)` returns nodes for a piece of the text, so that every
// character keeps the colour of its token.

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;

function inline(text, from, to, mark) {
  const nodes = [];
  let at = from;
  for (const found of text.slice(from, to).matchAll(INLINE)) {
    const start = from + found.index;
    const width = found[2] === undefined ? 1 : 2;
    const name = found[1] !== undefined ? "code" : width === 2 ? "strong" : "em";
    const end = start + found[0].length;
    nodes.push(...mark(at, start), element(name, "", ...mark(start + width, end - width)));
    at = end;
  }
  return [...nodes, ...mark(at, to)];
}

function markdown(text, mark) {
  const blocks = [];
  let at = 0;
  let list = null;
  let paragraph = null;
  let code = null;
  for (const line of text.split("\n")) {
    const [from, to] = [at, at + line.length];
    at = to + 1;
    const fence = /^\s*```/.test(line);
    if (code) {
      if (fence) code = null;
      else code.append(...mark(from, Math.min(to + 1, text.length)));
      continue;
    }
    const item = line.match(/^\s*(?:[-*+]|(\d+)[.)])\s+/);
    const heading = line.match(/^#{1,6}\s+/);
    if (!item) list = null;
    if (fence || item || heading || !line.trim()) paragraph = null;
    if (fence) {
      code = element("code", "");
      blocks.push(element("pre", "code", code));
    } else if (item) {
      const kind = item[1] ? "ol" : "ul";
      if (list?.localName !== kind) {
        list = element(kind, "");
        if (item[1]) list.start = Number(item[1]);
        blocks.push(list);
      }
      list.append(element("li", "", ...inline(text, from + item[0].length, to, mark)));
    } else if (heading) {
      blocks.push(element("p", "heading", ...inline(text, from + heading[0].length, to, mark)));
    } else if (line.trim()) {
      if (paragraph) paragraph.append(element("br"));
      else blocks.push((paragraph = element("p", "")));
      paragraph.append(...inline(text, from, to, mark));
    }
  }
  return blocks;
}

