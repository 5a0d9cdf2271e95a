// One pass over K and V for more than 16 rows: products of four warps (wgmma) with K and V in shared memory. sm_90a.
//
// Shapes, work split and joins as in attend.cuh. A block is two groups of four warps that take steps of kTokens tokens in
//   turn. A product has 64 rows: warps beyond the block's rows only help with it. What a group does of it is in group_tile.cuh.
// Steps: [1] q to shared memory, [2] scores, [3] softmax, a row in four lanes, [4] values, [5] partials, one for each group.
// Bytes: kv_len * (dqk + dv) * 2 for every stream and row block, once; up to 128 KB of it in flight per multiprocessor.
#pragma once

#include <climits>

#include "cuda/group_tile.cuh"
#include "cuda/join_cluster.cuh"
#include "cuda/join_workspace.cuh"
#include "kvonce/cuda.cuh"

namespace kvonce::cuda {

/// A block's work. K: kAttending is 2, the groups.
template <typename T, int kDim, int kRows, Join kJoin, class K>
__device__ __forceinline__ void attend_groups(const AttendParams& params, const BlockWork& w) {
  __shared__ std::uint64_t mail_barrier;
  __shared__ JoinTurn turn;
  GroupTile<T, kDim, kRows> tile;
  tile.open(params, w, shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);

  // Loads of the first steps go out before anything else is waited for.
  int token = w.begin + w.tile_begin * kTileTokens + static_cast<int>(tile.group) * tile.kTokens;
  const int end = min(w.end, w.begin + w.tile_end * kTileTokens);
  constexpr int kTokens = tile.kTokens;
  constexpr int kStride = 2 * kTokens;
  constexpr int kStages = tile.kStages;
  const bool early = params.earlier_kv_ready && token + kStride * kStages <= w.kv_len - params.q_len + kTokens;
  if (!early) cuda_wait_for_preceding();
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    tile.load_keys(params, i, token + i * kStride, end);
    tile.load_values(params, i, token + i * kStride, end);
  }
  touch_params(params);
  if constexpr (kJoin == kJoinCluster) open_mail<K>(params, w, &mail_barrier, kDim / 4);
  const MergeArea area = lay_out_area<K>(params, kRows, kDim, group_bytes(kDim, kRows));
  if (early) cuda_wait_for_preceding();
  tile.template share_rows<K>(params, w);
  Ticket ticket;
  if constexpr (kJoin != kJoinCluster) ticket = take_ticket(params, w);
  tile.clear();
  const int first_joining = kJoin == kJoinCluster ? 0 : w.num_splits - joiners_of(params, w, kDim / 4);
  if constexpr (kJoin != kJoinCluster) ask_again(params, w, first_joining, ticket);

  // Only the newest tokens, and with a window the oldest, are seen by some rows and not by others.
  const int differ_from = params.q_len > 1 && params.causal ? w.kv_len - params.q_len : INT_MAX;
  const int differ_to = params.q_len > 1 && params.window > 0 ? w.begin + params.q_len : INT_MIN;
  int stage = 0;
#pragma unroll 1
  for (int base = token - static_cast<int>(tile.group) * kTokens; base < end; base += kStride, token += kStride) {
    const int later = token + kStages * kStride;
    // Of either group's step: both pass as many barriers, which racecheck tells apart by their number alone.
    const bool differs = base + kStride > differ_from || base < differ_to;
    if (token >= end) {
      for (int i = 0; i < (differs ? 5 : 4); ++i) sync_group(tile.group);
      break;
    }
    tile.wait_for_oldest();
    tile.score_tokens(stage, params.scale_log2);
    tile.load_keys(params, stage, later, end);
    if (tile.has_rows()) {
      if (differs || token + kTokens > end) tile.hide_tokens(params, w, token, end);
      tile.update_softmax();
    }
    tile.wait_for_oldest();
    if (differs && tile.has_special_values(stage)) {
      tile.accumulate_apart(stage, params, w, token, end);
    } else {
      tile.accumulate_values(stage);
    }
    sync_group(tile.group);
    tile.load_values(params, stage, later, end);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  __syncthreads();  // the partials come where the stages are
  tile.store_partial(area);
  if constexpr (kJoin == kJoinCluster) {
    __syncthreads();
    join_cluster<K>(params, w, area, &mail_barrier, kDim / 4);
  } else {
    if (threadIdx.x == 0) turn.ticket = settle_ticket(params, w, ticket, first_joining, turn.left);
    __syncthreads();
    join_block<K, kJoin>(params, w, area, kDim / 4, turn);
  }
}

template <typename T, int kDim, int kRows, Join kJoin, class K>
__global__ void __launch_bounds__(K::kThreads, 1) attend_warpgroup(const __grid_constant__ AttendParams params) {
  cuda_trigger_dependents();
  const BlockWork w = find_work<kJoin, false>(params);
  if (w.split >= w.num_splits) return;
  attend_groups<T, kDim, kRows, kJoin, K>(params, w);
}

}  // namespace kvonce::cuda
