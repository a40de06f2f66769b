// Even parts of another kind, planned for as few column tiles as there are blocks (OWNERS): included behind list_parts.
#pragma once

// Owners. Each column tile has a block of its own for its first `length` key tiles; the rests, each behind OWNERS, lie end to end on an
// axis that the other blocks share evenly: helpers, who leave sums before the owner is through. Column tiles of a sequence meet in L2, but
// their rests do not: kNear key tiles of all sequences stay there (33 MB of 50).
constexpr int kNear = 448, kMostPieces = 4, kMostBlocks = 256;
struct OwnedRoom {                                         // of each column tile
  int seq[kMostBlocks], tile[kMostBlocks], rest[kMostBlocks], start[kMostBlocks], slot[kMostBlocks];
  Parts parts[kMostBlocks];                                // helpers that have a piece of it
};
// The smallest length with which helpers are through before owners; 0: none.
__device__ __forceinline__ int owned_length(const PlanParams& p, PlanRoom& r, int owners, int load, int longest, int t) {
  const int length = parts(load, p.blocks) + t;
  int rest = 0, near = 0;
  for (int b = 0; b < p.sequences; ++b) {
    const int over = most(r.keys[b] - length, 0);
    near += over;
    if (over) rest += r.tiles[b] * (over + OWNERS);
  }
  const bool fits = parts(rest, p.blocks - owners) + OWNERS <= length && near <= kNear && longest <= (kMostPieces - 1) * length;
  const uint32_t found = block_extreme<false>(r, 0, fits ? length : 0x7fffffffu, t);
  return found == 0x7fffffffu ? 0 : (int)found;
}
// As list_parts: owner i's item is items[i], helper h's k-th items[k * blocks + owners + h].
__device__ __forceinline__ bool list_owned(const PlanParams& p, PlanRoom& r, OwnedRoom& o, int owners, int length, int t) {
  if (t < owners) {
    int b = 0, tile = t;
    for (; tile >= r.tiles[b]; ++b) tile -= r.tiles[b];
    o.seq[t] = b;
    o.tile[t] = tile;
    const int rest = item_of(p, r, b, tile, 0, 1 << 30).tiles - length;
    o.rest[t] = rest < kLeastPiece ? 0 : rest;
  }
  if (t == 0) r.most_pieces = 1;
  __syncthreads();
  int axis = 0, slots = 0;
  for (int i = 0; i < owners; ++i) {
    if (i == t) o.start[i] = axis + OWNERS - kItemOverhead;  // as of `list_parts`: the overhead comes before the keys
    if (o.rest[i]) axis += o.rest[i] + OWNERS;
  }
  const int share = most(parts(axis, p.blocks - owners), 2 * kLeastPiece);
  if (t < owners) o.parts[t] = o.rest[t] ? parts_of(o.start, t, o.rest[t], share) : Parts{0, -1};
  __syncthreads();
  const int helper = t - owners;                           // below 0: an owner
  int pieces = 0;
  for (int i = 0; i < owners; ++i) {
    if (i == t) o.slot[i] = slots;
    slots += o.parts[i].last - o.parts[i].first + 1;
    pieces += o.parts[i].first <= helper && helper <= o.parts[i].last;
  }
  atomicMax(&r.most_pieces, pieces);
  __syncthreads();
  const int rounds = r.most_pieces;
  __syncthreads();                                         // it is read: list_parts has another use for it
  if (slots > p.slot_room || rounds * p.blocks > p.item_room) return false;
  if (t == 0) *p.count = rounds * p.blocks;
  if (t >= p.blocks) return true;
  Item* to = p.items + t;
  for (int i = helper < 0 ? t : 0; i < (helper < 0 ? t + 1 : owners); ++i) {
    const Parts f = o.parts[i];
    if (helper >= 0 && (helper < f.first || helper > f.last)) continue;
    const int from = helper < 0 ? 0 : length + cut(o.start, i, o.rest[i], helper, share);
    const int end = helper >= 0 ? length + cut(o.start, i, o.rest[i], helper + 1, share) : o.rest[i] ? length : 1 << 30;
    Item it = item_of(p, r, o.seq[i], o.tile[i], from, end);
    it.split = helper < 0 ? 0 : helper - f.first + 1;
    it.splits = f.last < f.first ? 1 : -(f.last - f.first + 2);
    it.slot = o.slot[i];
    if (it.splits == 1) it.stride = r.tiles[it.seq];       // others read its keys too: they are to stay in L2 for them
    it.counter = i;
    *to = it;
    to += p.blocks;
  }
  for (; to < p.items + (size_t)rounds * p.blocks; to += p.blocks) to->tiles = 0;
  return true;
}
