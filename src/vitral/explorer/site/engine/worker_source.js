/** The text of the bundled worker. `vitral explorer` replaces null; without a bundle, engine/worker.js is a module. */
export const WORKER_SOURCE = null;
