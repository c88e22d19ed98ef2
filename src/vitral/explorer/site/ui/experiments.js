// Ten experiments. Each is measured in the browser on the examples at hand; the right answer follows from the
// measurement, so that it is true for the model and the images of this site.
import { permutation } from "../engine/interventions.js";
import { app, argmax, hasClassToken, largest, numPatches, rowOf } from "./context.js";
import { comparisonMap, explanation, methodName } from "./honest.js";
import { summaryAttention } from "./tour_figures.js";

const MAX_IMAGES = 10; // images that an experiment measures
const BUDGET_MS = 15000; // compute time that an experiment may use; larger models measure fewer images

// The images of a measurement: { input, base, index }. The visitor's image comes first.
export async function images(limit = MAX_IMAGES, runsPerImage = 1) {
  const affordable = Math.max(2, Math.floor(BUDGET_MS / Math.max(app.base.ms * (runsPerImage + 1), 1)));
  const others = await app.exampleInputs(Math.min(limit, affordable));
  const list = [{ input: app.input, base: app.base }];
  for (const input of others) {
    if (list.length >= Math.min(limit, affordable)) break;
    if (input === app.input) continue;
    list.push({ input, base: await app.model.run(input) });
  }
  return list;
}

const best = (trace) => argmax(trace.probabilities);

// How many images keep their prediction under the changes, the mean probability that it keeps, and the mean largest
// change of a logit. changesOf(image): interventions of one image
export async function kept(list, changesOf, report = () => {}) {
  let same = 0;
  let probability = 0;
  let moved = 0;
  for (const [index, image] of list.entries()) {
    const trace = await app.model.run(image.input, changesOf(image), image.base);
    const expected = best(image.base);
    same += Number(best(trace) === expected);
    probability += trace.probabilities[expected];
    moved += maxDifference(image.base.logits, trace.logits);
    report((index + 1) / list.length);
  }
  return { same, total: list.length, share: same / list.length, probability: probability / list.length, moved: moved / list.length };
}

const threeWay = (share, high, low) => (share >= high ? 0 : share > low ? 1 : 2);

export const EXPERIMENTS = [
  {
    key: "positions",
    changes: () => ({ removePositions: true }),
    async measure(report) {
      const result = await kept(await images(), () => ({ removePositions: true }), report);
      return { answer: threeWay(result.share, 0.85, 0.35), ...result };
    },
  },
  {
    key: "set",
    changes: () => ({ removePositions: true, swapPatches: farPairs() }),
    // Without positions: does swapping patches change the logits?
    async measure(report) {
      const list = await images(MAX_IMAGES, 2);
      let largestChange = 0;
      let withPositions = 0;
      for (const [index, { input, base }] of list.entries()) {
        const without = await app.model.run(input, { removePositions: true }, base);
        const swapped = await app.model.run(input, { removePositions: true, swapPatches: farPairs() }, without);
        const ordinary = await app.model.run(input, { swapPatches: farPairs() }, base);
        largestChange = Math.max(largestChange, maxDifference(without.logits, swapped.logits));
        withPositions = Math.max(withPositions, maxDifference(base.logits, ordinary.logits));
        report((index + 1) / list.length);
      }
      return {
        answer: largestChange < 0.01 ? 0 : 1,
        change: largestChange,
        withPositions,
        total: list.length,
        hybrid: app.base.features !== null,
      };
    },
  },
  {
    key: "head",
    changes: (result) => ({ headsOff: [result?.freeHead ?? "0.0"] }),
    async measure(report) {
      const { depth, heads } = app.entry.config;
      const names = Array.from({ length: depth * heads }, (_, index) => `${Math.floor(index / heads)}.${index % heads}`);
      const list = await images(MAX_IMAGES, names.length);
      const change = [];
      let free = 0;
      for (const [index, name] of names.entries()) {
        const result = await kept(list, () => ({ headsOff: [name] }));
        free += Number(result.same === result.total);
        change.push(result.moved);
        report((index + 1) / names.length);
      }
      const without = await kept(list, () => ({ headsOff: names }));
      const order = largest(change.map((value) => -value), names.length);
      return {
        answer: free >= 0.75 * names.length ? 2 : free >= 0.25 * names.length ? 1 : 0,
        free, heads: names.length, none: without.same, total: list.length, grid: { values: change, rows: depth, columns: heads },
        freeHead: names[order[0]], freeName: headName(names[order[0]]), worstName: headName(names[order.at(-1)]),
        freeChange: change[order[0]], worstChange: change[order.at(-1)],
      };
    },
  },
  {
    key: "know",
    changes: () => ({}),
    // From which block on does the logit lens show the final prediction?
    async measure(report) {
      const { depth } = app.entry.config;
      const list = await images();
      const first = [];
      for (const [index, { base }] of list.entries()) {
        const lens = [];
        for (let layer = 0; layer <= depth; layer++) lens.push(argmax((await app.model.lens(base, layer)).pooledLogits));
        let layer = depth;
        while (layer > 0 && lens[layer - 1] === lens[depth]) layer--;
        first.push(layer);
        report((index + 1) / list.length);
      }
      const middle = [...first].sort((a, b) => a - b)[Math.floor(first.length / 2)];
      return {
        answer: middle <= depth / 3 ? 0 : middle <= (2 * depth) / 3 ? 1 : 2,
        own: first[0],
        median: middle,
        depth,
        total: list.length,
      };
    },
  },
  {
    key: "block",
    changes: (result) => ({ blocksOff: [result?.worst ?? 0] }),
    async measure(report) {
      const { depth } = app.entry.config;
      const list = await images(MAX_IMAGES, depth);
      const lost = [];
      for (let block = 0; block < depth; block++) {
        const result = await kept(list, () => ({ blocksOff: [block] }));
        lost.push(1 - result.probability);
        report((block + 1) / depth);
      }
      const worst = argmax(lost);
      const least = argmax(lost.map((value) => -value));
      return {
        answer: worst === 0 ? 0 : worst === depth - 1 ? 2 : 1, worst, worstName: worst + 1, leastName: least + 1,
        worstKeeps: 1 - lost[worst], leastKeeps: 1 - lost[least], total: list.length, grid: { values: lost, rows: 1, columns: depth },
      };
    },
  },
  {
    key: "residual",
    changes: () => ({ residualOff: [0] }),
    async measure(report) {
      const list = await images(MAX_IMAGES, 2);
      const dropped = await kept(list, () => ({ residualOff: [0] }), report);
      const skipped = await kept(list, () => ({ blocksOff: [0] }));
      return {
        answer: dropped.same === skipped.same ? 1 : dropped.same < skipped.same ? 0 : 2,
        same: dropped.same,
        skipped: skipped.same,
        total: list.length,
      };
    },
  },
  {
    key: "temperature",
    changes: (result) => ({ temperature: result?.answer === 0 ? 0.125 : 8 }),
    async measure(report) {
      const list = await images(MAX_IMAGES, 2);
      const sharp = await kept(list, () => ({ temperature: 0.125 }), (share) => report(share / 2));
      const flat = await kept(list, () => ({ temperature: 8 }), (share) => report(0.5 + share / 2));
      const gap = sharp.probability - flat.probability;
      return { answer: Math.abs(gap) < 0.05 ? 2 : gap < 0 ? 0 : 1, sharp: sharp.same, flat: flat.same, total: list.length };
    },
  },
  {
    key: "hide",
    changes: (result) => ({ maskPatches: result?.mask ?? [] }),
    values: () => ({ method: methodName(comparisonMap()), count: Math.max(1, Math.round(numPatches() / 4)) }),
    // Hide the quarter of the patches with the most attention, or the brightest quarter of another map.
    async measure(report) {
      const count = Math.max(1, Math.round(numPatches() / 4));
      const list = await images(6, comparisonMap() === "occlusion" ? numPatches() + 3 : 6);
      const byAttention = [];
      const byOther = [];
      for (const [index, { base }] of list.entries()) {
        byAttention.push(largest(summaryAttention(base, app.entry.config.depth - 1).subarray(app.entry.prefix), count));
        const map = await explanation(base, app.model, comparisonMap(), (share) => report((0.9 * (index + share)) / list.length));
        byOther.push(largest(map, count));
      }
      const position = new Map(list.map((image, index) => [image, index]));
      const attention = await kept(list, (image) => ({ maskPatches: byAttention[position.get(image)] }));
      const other = await kept(list, (image) => ({ maskPatches: byOther[position.get(image)] }));
      const random = await kept(list, (image) => ({ maskPatches: permutation(position.get(image) + 1, numPatches()).slice(0, count) }));
      report(1);
      const gap = attention.probability - other.probability;
      return {
        answer: Math.abs(gap) < 0.02 ? 2 : gap < 0 ? 0 : 1, count, mask: byAttention[0], total: list.length,
        method: methodName(comparisonMap()),
        attentionKeeps: attention.probability,
        otherKeeps: other.probability,
        randomKeeps: random.probability,
      };
    },
  },
  {
    key: "start",
    isPossible: () => hasClassToken() && app.entry.config.pooling === "class",
    changes: () => ({ classToken: "zero" }),
    async measure(report) {
      const list = await images(MAX_IMAGES, 2);
      const zero = await kept(list, () => ({ classToken: "zero" }), report);
      const mean = await kept(list, () => ({ classToken: "mean" }));
      return { answer: threeWay(zero.share, 0.85, 0.35), same: zero.same, mean: mean.same, total: list.length };
    },
  },
  {
    key: "patch",
    isPossible: () => !(hasClassToken() && app.entry.config.pooling === "class"),
    changes: () => ({}),
    // How many single patches of the last block predict the same class as all of them together?
    async measure(report) {
      const list = await images();
      const K = app.entry.classes.length;
      let agree = 0;
      for (const [index, { base }] of list.entries()) {
        const { probabilities } = await app.model.lens(base, app.entry.config.depth);
        for (let patch = 0; patch < numPatches(); patch++) agree += Number(
          argmax(rowOf(probabilities, app.entry.prefix + patch, K)) === best(base),
        );
        report((index + 1) / list.length);
      }
      const share = agree / (list.length * numPatches());
      return { answer: share >= 0.75 ? 2 : share >= 0.25 ? 1 : 0, share, total: list.length };
    },
  },
  {
    key: "merge",
    changes: () => ({ mergeTokens: { block: 0, pairs: Math.floor(numPatches() / 4) } }),
    async measure(report) {
      const depth = app.entry.config.depth;
      const pairs = Math.floor(numPatches() / 4);
      const list = await images(MAX_IMAGES, 2);
      const early = await kept(list, () => ({ mergeTokens: { block: 0, pairs } }), (share) => report(share / 2));
      const late = await kept(list, () => ({ mergeTokens: { block: depth - 1, pairs } }), (share) => report(0.5 + share / 2));
      return { answer: threeWay(early.share, 0.85, 0.35), same: early.same, late: late.same, pairs, total: list.length };
    },
  },
];

export const possibleExperiments = () => EXPERIMENTS.filter(({ isPossible }) => !isPossible || isPossible());

function headName(name) {
  const [block, head] = name.split(".").map(Number);
  return `${block + 1}.${head + 1}`;
}

// Pairs of patches far apart: corners and opposite sides.
function farPairs() {
  const [rows, columns] = app.entry.grid;
  const at = (row, column) => row * columns + column;
  const [middleRow, middleColumn] = [Math.floor(rows / 2), Math.floor(columns / 2)];
  return [
    [at(0, 0), at(rows - 1, columns - 1)],
    [at(middleRow, middleColumn), at(0, columns - 1)],
    [at(middleRow - 1, middleColumn - 1), at(rows - 1, 0)],
  ];
}

function maxDifference(a, b) {
  let largestDifference = 0;
  for (let i = 0; i < a.length; i++) largestDifference = Math.max(largestDifference, Math.abs(a[i] - b[i]));
  return largestDifference;
}
