"""Workspaces of plans on CUDA devices, in torch's memory."""
import concurrent.futures
import itertools
import sys

from . import _core

# By token: the Workspaces and their key, for each workspace that belongs to the graphs of a capture.
_kept: dict[int, tuple["Workspaces", tuple[int, int]]] = {}
_tokens = itertools.count(1)


def _collect():
    """Workspaces whose graphs have been destroyed are spares again."""
    for token in _core.released_captures():
        owner, key = _kept.pop(token)
        owner.give_back(key)


class Workspaces:
    """Those of one plan: one for each stream, one for each stream of a graph capture, and a spare.

    A capture must not use a workspace that other calls use, as its graph may be replayed beside them. What it allocates
    itself is of its graph's memory pool and has to be prepared by each replay. So calls outside of captures leave a
    spare, prepared, which a capture takes and keeps until its graphs are destroyed.

    allocate(stream, capturing), prepare(workspace, stream), retain(stream, token): what they say; after retain, the
    token is one of _core.released_captures() once the graphs of the stream's capture are gone. A workspace is a pair
    (address, owner).
    """

    def __init__(self, allocate, prepare, retain):
        self._allocate = allocate
        self._prepare = prepare
        self._retain = retain
        self._of_stream = {}
        self._of_capture = {}  # by (capture, stream): streams of one capture may run at once
        self._spares = []

    def take(self, stream, capture):
        """The workspace for a call on `stream`, which is in the graph capture of number `capture`; 0: in none."""
        if capture:
            return self._of_capture.get((capture, stream)) or self._take_for_capture(stream, capture)
        if self._spares and stream in self._of_stream:
            return self._of_stream[stream]
        return self._take_for_stream(stream)

    def give_back(self, key):
        self._spares.append(self._of_capture.pop(key))

    def _make(self, stream, capturing):
        workspace = self._allocate(stream, capturing)
        self._prepare(workspace[0], stream)
        return workspace

    def _take_for_stream(self, stream):
        _collect()
        if stream not in self._of_stream:
            self._of_stream[stream] = self._make(stream, False)
        if not self._spares:
            self._spares.append(self._make(stream, False))
        return self._of_stream[stream]

    def _take_for_capture(self, stream, capture):
        _collect()
        if not self._spares:
            return self._make(stream, True)  # for this call alone: the graph's pool may use the memory again after it
        token, key = next(_tokens), (capture, stream)
        self._retain(stream, token)
        _kept[token] = self, key
        self._of_capture[key] = self._spares.pop()
        return self._of_capture[key]


def _torch_stream(torch, stream, ordinal):
    if stream in (0, 1):  # the legacy default stream, in CUDA's numbers and in DLPack's
        return torch.cuda.default_stream(ordinal)
    return torch.cuda.ExternalStream(stream, ordinal)


def allocate(num_bytes, ordinal, stream, capturing):
    """A pair (address, tensor) in torch's memory of CUDA device `ordinal`, for work on `stream`."""
    import torch

    def empty():
        with torch.cuda.device(ordinal), torch.cuda.stream(_torch_stream(torch, stream, ordinal)):
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{ordinal}")
        return tensor.data_ptr(), tensor

    if capturing:
        return empty()
    # torch.compile's reduce-overhead lets its warm-up calls allocate in the pool of the graphs to come, and refuses
    # what stays there. That holds for the calling thread, as do inference mode and modes that make other tensors.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(empty).result()


def through_torch(attend, arrays, out, return_lse, stream):
    """attend(*tensors, out, stream) of arrays in CUDA memory that are not torch's; results are of q's kind.

    Each exporter makes the stream wait for its own work on the array, and whoever takes a result waits for attend: the
    arrays' __dlpack__ gets the stream, as DLPack says. None stays None.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise ValueError(f"q: got an object of type {type(arrays[0]).__name__} in CUDA memory without torch, allowed: "
                         "arrays in CPU memory; the package torch allocates in CUDA memory") from None
    ordinal = arrays[0].__dlpack_device__()[1]
    on = torch.cuda.current_stream(ordinal) if stream is None else _torch_stream(torch, stream, ordinal)

    def to_torch(array):
        exports = hasattr(array, "__dlpack__") and not isinstance(array, torch.Tensor)
        return torch.from_dlpack(array) if exports else array

    get_namespace = getattr(arrays[0], "__array_namespace__", None)
    package = sys.modules.get(type(arrays[0]).__module__.partition(".")[0])
    convert = getattr(get_namespace() if get_namespace else package, "from_dlpack", lambda tensor: tensor)
    with torch.cuda.device(ordinal), torch.cuda.stream(on):
        results = attend(*map(to_torch, arrays), to_torch(out), on.cuda_stream)
        results = results if return_lse else (results,)
        results = [out if out is not None and i == 0 else convert(result) for i, result in enumerate(results)]
    return tuple(results) if return_lse else results[0]
