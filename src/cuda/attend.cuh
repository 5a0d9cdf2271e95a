// One pass over K and V on the tensor cores: bf16 and f16. What a block does; what a warp does of it is in tile.cuh.
//
// Shapes: q [num_seqs, num_q_heads, q_len, dqk], k and v [num_seqs, num_kv_heads, kv_len, dqk or dv], rows at multiples of 16
//   bytes, out [num_seqs, num_q_heads, q_len, dv]. A KV stream (sequence, KV head) has group_size * q_len rows.
// Work split: grid (splits, KV heads x row blocks, sequences); a block owns a range of tokens for 8 to 32 rows, and its warps
//   take steps of 16, 32 or 64 tokens in turn.
// Steps: [1] q, [2] scores, [3] softmax, [4] values, [5] partials: tile.cuh; then the warps' join and the blocks'.
// Bytes: kv_len * (dqk + dv) * 2 for every stream and row block, once; 64 to 128 KB of it in flight per multiprocessor.
// Registers (sm_90a): 125 (d64) and 145 (d128) plain, 154 to 203 one tile of 8 rows, 255 four tiles; K and V of more than 256
//   dims are staged in shared memory, 136 KB.
// Not here: float32, mixed types, other dims, unaligned rows (attend_generic.cuh).
#pragma once

#include <climits>

#include "cuda/join_cluster.cuh"
#include "cuda/join_lanes.cuh"
#include "cuda/tile.cuh"
#include "kvonce/cuda.cuh"

namespace kvonce::cuda {

/// A plan for a long cache serves short ones too: where plain decode has a loop, a block with few tiles takes the body
/// without one, by half the warps.
constexpr int kShortWarps = 4;
constexpr int kShortTiles = 2;

/// Whether the KV head's rows are found while a length in memory is on its way: in plans for long caches. In the instances without a
/// loop some rows whose length the host knows lose up to 0.28 us (H200, docs/kernel-cuda.md).
template <int kDimQk, Join kJoin, bool kOneStep, class K>
constexpr bool kEarlyRows = (kJoin == kJoinWorkspace) && (kDimQk > 64) && (K::kPlain) &&
                            (!kOneStep || K::kAttending < K::kWarps);

/// Whether blocks join as in join_lanes.cuh.
template <int kDimV, class K>
constexpr bool kKnowsPlaces = (kDimV > 64) && (K::kByLanes);

/// A block's work. kOneStep: no warp has more than one step.
template <typename T, int kDimQk, int kDimV, int kRowTiles, int kTokenTiles, bool kStaged, Join kJoin, bool kOneStep,
          class K>
__device__ __forceinline__ void attend_block(const AttendParams& params, const BlockWork& w) {
  __shared__ std::uint64_t mail_barrier;
  __shared__ JoinTurn turn;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const bool attends = K::kAttending == K::kWarps || warp < K::kAttending;

  constexpr int kStep = kTokenTiles * kTileTokens;
  Tile<T, kDimQk, kDimV, kRowTiles, kTokenTiles, kStaged, K> tile;
  __shared__ std::uint64_t kv_barriers[kStaged ? 2 * K::kWarps : 1];
  tile.open(params, w.seq, w.kv_head, kv_barriers);
  if constexpr (kEarlyRows<kDimQk, kJoin, kOneStep, K>) {
    tile.k_base = reinterpret_cast<const T*>(w.k);
    tile.v_base = reinterpret_cast<const T*>(w.v);
  }

  // The warps take the block's steps in turn. Loads of the first go out before anything else is waited for.
  int token = w.begin + w.tile_begin * kTileTokens + warp * kStep;
  const int end = min(w.end, w.begin + w.tile_end * kTileTokens);
  bool has_step = token < end;
  const bool early = params.earlier_kv_ready && token + kStep <= w.kv_len - (K::kPlain ? 1 : params.q_len);
  if (!early) cuda_wait_for_preceding();
  if (has_step) {
    tile.load_keys(params, token, end);
    tile.load_values(params, token, end);
  }
  touch_params(params);
  if constexpr (kJoin == kJoinCluster) open_mail<K>(params, w, &mail_barrier, kDimV / 4);
  const MergeArea area =
      lay_out_area<K>(params, tile.kRows, kDimV, kStaged ? K::kWarps * stage_bytes(kDimQk, kDimV, kTokenTiles) : 0);
  if (early) cuda_wait_for_preceding();
  if constexpr (tile.kSharedQ) {
    __shared__ uint4 q_shared[kRowTiles * (kDimQk / 32) * 32];
    tile.share_row_tile(params, w, q_shared);
  } else {
    if (attends) tile.load_row_tile(params, w);
  }
  Ticket ticket;
  // A warp without tokens sees to the ticket where there is one; else the first warp does so, whenever it waits for K and V anyway.
  constexpr bool kIdleWarps = K::kAttending < K::kWarps;
  constexpr unsigned kTicketThread = kIdleWarps ? 32 * (K::kWarps - 1) : 0;
  if constexpr (kJoin != kJoinCluster) ticket = take_ticket(params, w, kTicketThread);
  LanePlaces places;
  if constexpr (kKnowsPlaces<kDimV, K>) places = find_lane_places<K>(params, w, kDimV / 4);
  int first_joining = 0;
  if constexpr (kJoin != kJoinCluster) {
    first_joining = w.num_splits - joiners_of(params, w, kDimV / 4);
    if constexpr (kIdleWarps) {
      if (threadIdx.x == kTicketThread) {
        ask_again(params, w, first_joining, ticket, kTicketThread);
        turn.ticket = settle_ticket(params, w, ticket, first_joining, turn.left);
      }
    }
  }
  tile.clear();

  // Only the newest tokens, and with a window the oldest, are seen by some rows and not by others.
  const int differ_from = !K::kPlain && params.q_len > 1 && params.causal ? w.kv_len - params.q_len : INT_MAX;
  const int differ_to = !K::kPlain && params.q_len > 1 && params.window > 0 ? w.begin + params.q_len : INT_MIN;
  const auto hide_tokens = [&] {
    if constexpr (K::kPlain) {
      if (token + kStep > end) tile.hide_tail(token, end);
    } else {
      if (token + kStep > min(end, differ_from) || token < differ_to) tile.hide_tokens(params, w, token, end);
    }
  };
  const auto accumulate_values = [&] {
    if constexpr (!K::kPlain) {
      if ((token + kStep > differ_from || token < differ_to) && tile.has_special_values()) {
        tile.accumulate_apart(params, w, token, end);
        return;
      }
    }
    tile.accumulate_values();
  };
  if constexpr (kJoin != kJoinCluster && !kIdleWarps) ask_again(params, w, first_joining, ticket);
  if constexpr (kOneStep) {
    if (has_step) {
      tile.score_tokens(params.scale_log2);
      hide_tokens();
      tile.template update_softmax<true>();
      accumulate_values();
    }
  } else {
    while (has_step) {
      const int next = token + K::kWarps * kStep;
      const bool has_next = next < end;
      tile.wait_for_keys();
      tile.score_tokens(params.scale_log2);
      if (has_next) tile.load_keys(params, next, end);
      hide_tokens();
      tile.template update_softmax<false>();
      tile.wait_for_values();
      accumulate_values();
      if (has_next) tile.load_values(params, next, end);
      token = next;
      has_step = has_next;
    }
  }

  if constexpr (kStaged) __syncthreads();  // the partials come where the stages are
  if (attends) tile.store_partial(area, warp);
  if constexpr (kJoin == kJoinCluster) {
    __syncthreads();
    join_cluster<K>(params, w, area, &mail_barrier, kDimV / 4);
  } else {
    if constexpr (!kIdleWarps) {
      if (threadIdx.x == 0) turn.ticket = settle_ticket(params, w, ticket, first_joining, turn.left);
    }
    __syncthreads();
    if constexpr (kKnowsPlaces<kDimV, K>) {
      join_by_lanes<K>(params, w, area, kDimV / 4, places, turn);
    } else {
      join_block<K, kJoin>(params, w, area, kDimV / 4, turn);
    }
  }
}

template <typename T, int kDimQk, int kDimV, int kRowTiles, int kTokenTiles, bool kStaged, Join kJoin, bool kOneStep,
          class K>
__global__ void __launch_bounds__(K::kThreads, 1) attend_mma(const __grid_constant__ AttendParams params) {
  cuda_trigger_dependents();
  const BlockWork w = find_work<kJoin, K::kPlain, kEarlyRows<kDimQk, kJoin, kOneStep, K>>(params);
  if (w.split >= w.num_splits) return;
  if constexpr (K::kPlain && kJoin == kJoinWorkspace && !kOneStep) {
    if (w.tile_end - w.tile_begin <= kShortWarps * kShortTiles) {
      // Two bodies: code that is there and not run costs time too. H200, 64q/8kv d64, 2,048 of 131,072 tokens: 5.15 us, 4.85 us by lanes.
      using ByLanes = Known<K::kWarps, true, typename K::Out, 0, kShortWarps>;
      const bool is_joined = !kKnowsPlaces<kDimV, ByLanes> || w.num_splits > 1;
      if (is_joined && w.num_splits <= static_cast<int>(kLaneSplits)) {
        attend_block<T, kDimQk, kDimV, kRowTiles, kShortTiles, false, kJoin, true, ByLanes>(params, w);
      } else {
        attend_block<T, kDimQk, kDimV, kRowTiles, kShortTiles, false, kJoin, true,
                     Known<K::kWarps, true, typename K::Out, 1, kShortWarps>>(params, w);
      }
      return;
    }
  }
  attend_block<T, kDimQk, kDimV, kRowTiles, kTokenTiles, kStaged, kJoin, kOneStep, K>(params, w);
}

}  // namespace kvonce::cuda
