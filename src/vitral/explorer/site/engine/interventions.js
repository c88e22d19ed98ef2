/** Interventions: what they change, and from which block on. See engine.js for their meaning. */

const DEFAULTS = {
  maskPatches: [], swapPatches: [], shufflePositions: null, removePositions: false, classToken: "learned",
  mergeTokens: null, headsOff: [], attentionOff: [], mlpOff: [], blocksOff: [], residualOff: [], temperature: 1,
};
const EMBEDDING_FIELDS = ["maskPatches", "swapPatches", "shufflePositions", "removePositions", "classToken"];

/** The interventions with all fields present. Throws for unknown names, so that a typing error is not a no-op. */
export function complete(interventions) {
  for (const name of Object.keys(interventions)) {
    if (!(name in DEFAULTS)) throw new Error(`unknown intervention ${name}; known: ${Object.keys(DEFAULTS).join(", ")}`);
  }
  return { ...DEFAULTS, ...interventions };
}

/** What happens in one block. */
export function blockChanges(all, block) {
  const prefix = `${block}.`;
  const isListed = (list) => list.map(String).includes(String(block));
  const hasResidualOff = (branch) => isListed(all.residualOff) || all.residualOff.includes(`${block}.${branch}`);
  const { temperature, mergeTokens } = all;
  return {
    headsOff: all.headsOff.filter((name) => name.startsWith(prefix)).map((name) => Number(name.slice(prefix.length))).sort(),
    attentionOff: isListed(all.attentionOff) || isListed(all.blocksOff),
    mlpOff: isListed(all.mlpOff) || isListed(all.blocksOff),
    attentionResidualOff: hasResidualOff("attention"),
    mlpResidualOff: hasResidualOff("mlp"),
    temperature: typeof temperature === "number" ? temperature : temperature[block] ?? 1,
    pairs: mergeTokens !== null && mergeTokens.block === block ? mergeTokens.pairs : 0,
    useRope: !(all.removePositions === true || all.removePositions === "rotary"),
  };
}

/** The first block whose result differs between two sets of interventions on the same image; -1: the embedding. */
export function firstChange(before, after, depth) {
  const differs = (a, b) => JSON.stringify(a) !== JSON.stringify(b);
  if (EMBEDDING_FIELDS.some((name) => differs(before[name], after[name]))) return -1;
  for (let block = 0; block < depth; block++) {
    if (differs(blockChanges(before, block), blockChanges(after, block))) return block;
  }
  return depth;
}

/** A pseudo-random permutation of 0..count-1 from a seed (mulberry32, Fisher-Yates). */
export function permutation(seed, count) {
  const order = Array.from({ length: count }, (_, index) => index);
  let state = seed >>> 0;
  const random = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  for (let i = count - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

/** Groups of patches after merging the `pairs` most similar pairs: for each patch the first patch of its group.
 *
 * Bipartite matching of ToMe (arXiv 2210.09461): every patch of even index finds the most similar patch of odd index
 * (cosine); the most similar of these pairs are merged. Several patches may join the same one. */
export function mergeGroups(tokens, prefix, N, D, pairs) {
  const norms = Float64Array.from({ length: N }, (_, i) => Math.sqrt(dot(tokens, prefix + i, prefix + i, D)));
  const candidates = [];
  for (let a = 0; a < N; a += 2) {
    let best = { a, b: -1, similarity: -Infinity };
    for (let b = 1; b < N; b += 2) {
      const similarity = dot(tokens, prefix + a, prefix + b, D) / (norms[a] * norms[b]);
      if (similarity > best.similarity) best = { a, b, similarity };
    }
    if (best.b >= 0) candidates.push(best);
  }
  candidates.sort((one, other) => other.similarity - one.similarity);
  const partner = Array.from({ length: N }, (_, i) => i);
  for (const { a, b } of candidates.slice(0, pairs)) partner[a] = b;
  const first = new Map();
  partner.forEach((name, i) => first.has(name) || first.set(name, i));
  return partner.map((name) => first.get(name));
}

function dot(tokens, i, j, D) {
  let sum = 0;
  for (let c = 0; c < D; c++) sum += tokens[i * D + c] * tokens[j * D + c];
  return sum;
}

/** T×D tokens in which all patches of a group are their mean. */
export function mergeTokens(tokens, groups, prefix, D) {
  const out = tokens.slice(), sizes = new Map();
  groups.forEach((name) => sizes.set(name, (sizes.get(name) ?? 0) + 1));
  for (const [name, size] of sizes) {
    if (size === 1) continue;
    const members = groups.flatMap((other, i) => (other === name ? [prefix + i] : []));
    for (let c = 0; c < D; c++) {
      const mean = members.reduce((sum, row) => sum + tokens[row * D + c], 0) / size;
      for (const row of members) out[row * D + c] = mean;
    }
  }
  return out;
}
