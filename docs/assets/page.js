// Line breaks and names, which Markdown cannot set.

// Replace the matches of a pattern in the texts inside of an element.
const replaceIn = (element, pattern, make) => {
  const texts = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), found = [];
  while (texts.nextNode()) if (texts.currentNode.data.match(pattern)) found.push(texts.currentNode);
  for (const text of found)
    text.replaceWith(...text.data.split(pattern).map((part, place) => (place % 2 ? make(part) : part)));
};
const whole = (text) => {
  const span = document.createElement("span");
  span.className = "whole";
  span.textContent = text;
  return span;
};
const breakable = (text) => {
  const part = document.createDocumentFragment();
  part.append(text, document.createElement("wbr"));
  return part;
};

// An option such as --seeds stays on one line, and so does a number with its spread.
document.querySelectorAll(".md-content").forEach((content) =>
  replaceIn(content, /((?<![\w-])--?[a-z][\w-]*|\S+ ± \S+)/, whole));
// Long code, such as the name of a test, may break.
document.querySelectorAll(".md-content :not(pre) > code").forEach((code) => {
  if (code.textContent.length < 30) return;
  code.classList.add("long");
  replaceIn(code, /(_|\/|::)/, breakable);
});

// Two sections of the navigation have a page, and therefore a switch without a name.
document.querySelectorAll("label.md-nav__link[id]").forEach((label) => {
  if (!label.textContent.trim())
    label.ariaLabel = document.querySelector(`.md-nav__title[for="${label.htmlFor}"]`).textContent.trim();
});
