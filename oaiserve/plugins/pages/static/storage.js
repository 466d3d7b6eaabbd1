// The browser's storage for good and for this tab, or memory where the browser allows none.

class Memory {
  getItem(key) {
    return this[key] ?? null;
  }

  setItem(key, text) {
    this[key] = text;
  }

  removeItem(key) {
    delete this[key];
  }
}

// Browsers that block cookies refuse even to name their storage.
function open(name) {
  try {
    return window[name] ?? new Memory();
  } catch {
    return new Memory();
  }
}

export const local = open("localStorage");
export const session = open("sessionStorage");
export const isLasting = !(local instanceof Memory);
