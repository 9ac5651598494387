// Asks the server that sent this page. The admin key is kept for this tab only.

const STORED = "kvshare-admin-key";

/** An answer that is not 2xx, with the server's own words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED),
  set: (value) => sessionStorage.setItem(STORED, value),
  forget: () => sessionStorage.removeItem(STORED),
};

/** GET ../path; `query`: arguments, of which null and undefined are left out. */
export function ask(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const text = new URLSearchParams(given).toString();
  return answered(`../${path}${text ? `?${text}` : ""}`, { cache: "no-store" });
}

/** POST ../path with a JSON body. It is never cached; `cache` would add a header that switches sharing off. */
export function command(path, body) {
  const headers = { "Content-Type": "application/json" };
  return answered(`../${path}`, { method: "POST", headers, body: JSON.stringify(body) });
}

async function answered(address, options) {
  const headers = { ...options.headers };
  if (key.get()) headers["X-Api-Key"] = key.get();
  let response;
  try {
    response = await fetch(address, { ...options, headers, credentials: "omit", redirect: "error" });
  } catch {
    throw new ApiError(0, "The server does not answer. It may have been stopped, or the network is down.");
  }
  const document = await response.json().catch(() => ({}));
  if (response.ok) return document;
  throw new ApiError(response.status, document.error?.message ?? document.detail ?? `The server answered ${response.status}.`);
}
