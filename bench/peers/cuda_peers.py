#!/usr/bin/env python3
"""Times kvonce and other libraries' attention side by side on a CUDA device: one process, the same rotated buffers, bf16.

usage: bench/peers/cuda_peers.py --out FILE [--chain] [--kvonce LIBRARY] [--read FILE] [--lens 2048,8192] [--peers torch,fa3]

Isolated calls, or with --chain what attention adds to a chain of tiny kernels: one that writes q and the newest row of K and V,
attention, one that reads the result. Every arm is compared with float32 first. The file is written after every case, the table
at the end; bench/table.py --cuda-peers FILE prints it again. Method: README.md here.

Exit code: 1 when kvonce failed or was wrong or a case was not measured (a peer's failure is in the file, under `failed`), 2 for
arguments, 3 without torch or a CUDA device.
"""
import argparse
import ctypes
import gc
import json
import pathlib
import re
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "bench"))

import table  # noqa: E402

POOL_ELEMENTS = 7 << 28  # 3.75 GB
ROUNDS = 15
HOLD_CYCLES = 400_000  # the device idles this long, 0.2 ms, while the host launches a graph
MAX_ERROR = 1e-2  # relative L2: twice what bf16 results of any arm here have
NEIGHBOURS = ("plain", "late", "early")  # the numbers of kvonce_bench_produce's form
CASE = re.compile(r"(\d+)q/(\d+)kv d(\d+) kv=(\d+)(?: q=1)?(?: seqs=1)?")


def stop(message, code=2):
    print(f"cuda_peers: {message}", file=sys.stderr)
    sys.exit(code)


def first_line(error):
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


class Graph:
    """step.calls calls, on every set in turn, as one CUDA graph."""

    def __init__(self, torch, call, step):
        self.torch, self.calls = torch, step.calls
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # what is compiled, planned or allocated by a first call
            call(0)
            call(step.checked_set)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for idx in range(step.calls):
                self.out = call(idx % step.num_sets)

    def replay_us(self):
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda._sleep(HOLD_CYCLES)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self.calls

    def error(self, step, layout, in_chain):
        """Relative L2 of what the last call leaves. In a chain q and the newest rows are NaN until the producer has run."""
        k, v = step.kv(layout)[step.checked_set]
        written = (step.q, layout.newest(k), layout.newest(v)) if in_chain else ()
        for tensor in (self.out, *written):
            tensor.fill_(float("nan"))
        self.graph.replay()
        self.torch.cuda.synchronize()
        expected = step.reference(layout, k, v)
        got = self.out.float().reshape(expected.shape)
        return float((got - expected).norm() / expected.norm())


class Neighbours:
    """libkvonce_neighbours.so: the producer and the consumer of a chain."""

    def __init__(self, torch, path):
        lib = ctypes.CDLL(str(path))
        pointer, size, stride = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong
        lib.kvonce_bench_produce.argtypes = [ctypes.c_int, pointer, pointer, size, pointer, pointer, pointer, pointer,
                                             size, stride, stride, ctypes.c_int, pointer, pointer]
        lib.kvonce_bench_consume.argtypes = [ctypes.c_int, pointer, size, pointer, pointer]
        self.torch, self.lib = torch, lib
        self.consumed = torch.zeros(lib.kvonce_bench_consumed_floats(), device="cuda")

    def chain(self, step, layout, form, attend):
        """attend None: the chain without attention."""
        targets = [[(row.data_ptr(), row.stride(0) * row.element_size()) for row in map(layout.newest, one)]
                   for one in step.kv(layout)]
        q_bytes, row_bytes = (tensor.nbytes // heads for tensor, heads in ((step.q, 1), (step.k_from, step.kv_heads)))
        number = NEIGHBOURS.index(form)

        def call(i):
            stream = self.torch.cuda.current_stream().cuda_stream
            (k_row, k_stride), (v_row, v_stride) = targets[i]
            self.check("produce", self.lib.kvonce_bench_produce(
                number, step.q.data_ptr(), step.q_from.data_ptr(), q_bytes, k_row, step.k_from.data_ptr(), v_row,
                step.v_from.data_ptr(), row_bytes, k_stride, v_stride, step.kv_heads, self.consumed.data_ptr(), stream))
            out = attend(i) if attend else step.q
            self.check("consume", self.lib.kvonce_bench_consume(number, out.data_ptr(), out.nbytes,
                                                                self.consumed.data_ptr(), stream))
            return out

        return call

    @staticmethod
    def check(what, error):
        if error:
            raise RuntimeError(f"kvonce_bench_{what}: cudaError_t {error}")


class Bench:
    def __init__(self, torch, peers, neighbours):
        self.torch, self.peers, self.neighbours, self.failed = torch, peers, neighbours, []

    def fail(self, case, arm, kernel, error):
        self.failed.append({"case": case, "arm": arm, "kernel": kernel, "message": first_line(error)})
        print(f"cuda_peers: {case or 'set-up'}: {arm} {kernel}: {self.failed[-1]['message']}", file=sys.stderr, flush=True)
        try:
            self.torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - the device is lost; every later arm will say so
            pass

    def forms(self, case, step):
        for name, peer in self.peers.items():
            try:
                yield from peer.forms(step, self.neighbours is not None)
            except Exception as error:  # noqa: BLE001 - one peer's failure must not stop the others
                self.fail(case, name, "", error)

    def checked(self, step, form, attend, neighbours):
        """(Graph, its error); with neighbours of that form around attention, or None."""
        call = self.neighbours.chain(step, form.layout, neighbours, attend) if neighbours else attend
        graph = Graph(self.torch, call, step)
        error = graph.error(step, form.layout, neighbours is not None)
        if not error <= MAX_ERROR:
            raise ArithmeticError(f"wrong result: relative L2 error {error:.1e}, allowed {MAX_ERROR:.0e}"
                                  + (f", {neighbours} neighbours" if neighbours else ""))
        return graph, error

    def best_forms(self, case, step):
        """Of every arm the fastest form: {arm: (form, attend, graph, error)}. In a chain, early neighbours decide."""
        best, least_us = {}, {}
        for form in self.forms(case, step):
            try:
                attend = form.make()
                graph, error = self.checked(step, form, attend, NEIGHBOURS[-1] if self.neighbours else None)
                us = statistics.median(graph.replay_us() for _ in range(3))
            except Exception as problem:  # noqa: BLE001 - as above
                self.fail(case, form.arm, form.kernel, problem)
                continue
            if us < least_us.get(form.arm, float("inf")):
                least_us[form.arm], best[form.arm] = us, (form, attend, graph, error)
        return best

    def timed(self, graphs, rounds):
        """{key: microseconds of every round}; each graph once a round, a different one first each time."""
        keys, times = list(graphs), {key: [] for key in graphs}
        for graph in graphs.values():
            graph.replay_us()
        for round_idx in range(rounds):
            for step in range(len(keys)):
                key = keys[(round_idx + step) % len(keys)]
                times[key].append(graphs[key].replay_us())
        return times

    def isolated_rows(self, case, step, rounds):
        best = self.best_forms(case, step)
        times = self.timed({arm: graph for arm, (_, _, graph, _) in best.items()}, rounds)
        for arm, (form, _, _, error) in best.items():
            median = statistics.median(times[arm])
            yield row_of(case, step, form, error, "isolated", median, min(times[arm]))

    def chain_rows(self, case, step, rounds):
        """Every arm with every form of the neighbours: what it adds to the same chain without attention."""
        best = self.best_forms(case, step)
        graphs, errors = {}, {}
        for neighbours in NEIGHBOURS:
            layout = next(iter(best.values()))[0].layout if best else None
            if layout:
                graphs[None, neighbours] = Graph(self.torch, self.neighbours.chain(step, layout, neighbours, None), step)
            for arm, (form, attend, graph, error) in best.items():
                try:
                    pair = (graph, error) if neighbours == NEIGHBOURS[-1] else self.checked(step, form, attend, neighbours)
                except Exception as problem:  # noqa: BLE001 - as above
                    self.fail(case, arm, form.kernel, problem)
                    continue
                graphs[arm, neighbours], errors[arm, neighbours] = pair
        if "kvonce" in best:
            graphs["kvonce", None] = Graph(self.torch, best["kvonce"][1], step)
        times = self.timed(graphs, rounds)
        medians = {key: statistics.median(us) for key, us in times.items()}
        for (arm, neighbours), error in errors.items():
            without = medians[None, neighbours]
            row = row_of(case, step, best[arm][0], error, "chain", medians[arm, neighbours] - without,
                         min(times[arm, neighbours]) - without)
            yield {**row, "neighbours": neighbours, "chain_us_median": medians[arm, neighbours],
                   "neighbours_us_median": without, "isolated_us_median": medians.get(("kvonce", None))}


def row_of(case, step, form, error, mode, us_median, us_min):
    return {"case": case, "num_q_heads": step.q_heads, "num_kv_heads": step.kv_heads, "head_dim_qk": step.dim,
            "head_dim_v": step.dim, "kv_len": step.kv_len, "q_len": 1, "num_seqs": 1, "kv_dtype": "bf16",
            "backend": "cuda", "q_dtype": "bf16", "mode": mode, "arm": form.arm, "kernel": form.kernel,
            "us_median": us_median, "us_min": us_min, "kv_bytes": step.kv_bytes,
            "gbps": step.kv_bytes / us_median * 1e-3 if us_median > 0 else None, "rel_rms_error": error}


def with_read(rows, read):
    """The rows of a case behind that of `kvonce bench`'s read arm, where there is one, which gives them ratio_to_read."""
    if read is None:
        return rows
    return [read] + [{**row, "ratio_to_read": read["us_median"] / row["us_median"]}
                     if row["mode"] == "isolated" else row for row in rows]


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--chain", action="store_true", help="what attention adds to a chain, instead of isolated calls")
    parser.add_argument("--cases", type=pathlib.Path, default=ROOT / "bench" / "cases" / "cuda.txt")
    parser.add_argument("--case", action="append", default=[], help="such as '32q/4kv d128 kv=8192', instead of --cases")
    parser.add_argument("--lens", help="of the cases those with these kv_lens: 2048,8192")
    parser.add_argument("--peers", default="torch,flashinfer,fa3", help="beside kvonce; all by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after that time")
    parser.add_argument("--kvonce", type=pathlib.Path, help="libkvonce.so; by default the newest under build/")
    parser.add_argument("--neighbours", type=pathlib.Path,
                        help="libkvonce_neighbours.so for --chain; by default that of the same build folder")
    parser.add_argument("--read", type=pathlib.Path, help="`kvonce bench` results whose arm `read` stands beside the arms")
    return parser.parse_args()


def find_libraries(options):
    built = sorted(ROOT.glob("build/*/src/libkvonce.so"), key=lambda path: path.stat().st_mtime)
    options.kvonce = options.kvonce or (built[-1] if built else ROOT / "build" / "release" / "src" / "libkvonce.so")
    if not options.kvonce.exists():
        stop(f"--kvonce: no {options.kvonce}")
    if options.chain:
        build = options.kvonce.absolute().parents[1]
        options.neighbours = options.neighbours or build / "bench" / "libkvonce_neighbours.so"
        if not options.neighbours.exists():
            stop(f"--neighbours: no {options.neighbours}")


def cases_of(options):
    lines = options.case or options.cases.read_text(encoding="utf-8").splitlines()
    lens = options.lens.split(",") if options.lens else None
    for line in lines:
        text = line.split("#")[0].strip()
        match = CASE.fullmatch(text)
        if text and not match:
            stop(f"case '{text}': only 'HQq/HKVkv dD kv=N', one sequence and one new token, is served here")
        if match and (lens is None or match[4] in lens):
            yield f"{match[1]}q/{match[2]}kv d{match[3]} kv={match[4]} q=1 seqs=1", tuple(map(int, match.groups()))


def reads_of(path):
    """The `read` rows of a `kvonce bench` file by case."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path else []
    return {row["case"]: row for row in rows if row["arm"] == "read"}


def load_peers(bench, options, arms):
    makers = {"kvonce": lambda: arms.Kvonce(options.kvonce), **arms.PEERS}
    for name in ["kvonce", *filter(None, options.peers.split(","))]:
        if name not in makers:
            stop(f"--peers: got '{name}'; allowed: {', '.join(arms.PEERS)}")
        try:
            bench.peers[name] = makers[name]()
        except Exception as error:  # noqa: BLE001 - a peer that is not installed, or installed badly
            bench.fail(None, name, "", error)


def main():
    options = parse_options()
    cases = list(cases_of(options))
    reads = reads_of(options.read)
    try:
        import torch

        import cuda_arms
    except ImportError as error:
        stop(error, 3)
    if not torch.cuda.is_available():
        stop("torch sees no CUDA device", 3)
    find_libraries(options)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    bench = Bench(torch, {}, Neighbours(torch, options.neighbours) if options.chain else None)
    load_peers(bench, options, cuda_arms)
    gc.freeze()  # what is loaded stays, and capturing a graph collects garbage
    pool = torch.randn(POOL_ELEMENTS, device="cuda", dtype=cuda_arms.BF16)
    properties = torch.cuda.get_device_properties(0)
    report = {"schema": "kvonce.peers/1",
              "device": {"name": properties.name, "cuda_target": f"sm_{properties.major}{properties.minor}",
                         "num_sms": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size},
              "versions": {name: version for peer in bench.peers.values() for name, version in peer.versions.items()},
              "rounds": options.rounds, "rows": [], "failed": bench.failed}
    begin = time.monotonic()
    for case, shape in cases:
        try:
            if time.monotonic() - begin > options.seconds:
                raise TimeoutError(f"not measured: --seconds {options.seconds:g} were over")
            step = cuda_arms.Step(pool, *shape)
            measure = bench.chain_rows if options.chain else bench.isolated_rows
            rows = list(measure(case, step, options.rounds))
        except Exception as error:  # noqa: BLE001 - the other cases may work
            bench.fail(case, "kvonce", "and every peer", error)
            continue
        report["rows"] += with_read(rows, reads.get(case))
        print(case, *(f"{row['arm']} {row.get('neighbours', '')} {row['us_median']:.2f}".replace("  ", " ") for row in rows),
              sep="  ", flush=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print()
    table.print_cuda_peers(options.out)
    return 1 if any(failure["arm"].startswith("kvonce") for failure in bench.failed) else 0


if __name__ == "__main__":
    sys.exit(main())
