// Returns a pair [contrast ratio, name] for every visible text, by WCAG, against the nearest background that is not
// transparent.
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  function rgba(text) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  }

  function luminance(color) {
    const [red, green, blue] = color
      .slice(0, 3)
      .map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  }

  function background(node) {
    for (; node; node = node.parentElement) {
      const color = rgba(getComputedStyle(node).backgroundColor);
      if (color[3] > 0) return color;
    }
    return rgba("white");
  }

  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
    if (!hasText || !node.checkVisibility()) continue;
    const pair = [luminance(rgba(getComputedStyle(node).color)), luminance(background(node))];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    found.push([ratio, `${node.tagName} ${node.className} ${node.textContent.slice(0, 30)}`]);
  }
  return found;
}
