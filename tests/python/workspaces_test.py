"""Which workspace a call on a CUDA device gets: nothing here needs such a device."""
import sys
import unittest
import unittest.mock

import kvonce
from kvonce import _core, _workspaces
from oracle import values


class WorkspacesTest(unittest.TestCase):
    """Streams, captures and workspaces are numbers; what is done to them is written down."""

    def setUp(self):
        self.made, self.prepared, self.retained, self.released = [], [], {}, []
        self.workspaces = _workspaces.Workspaces(self.allocate, self.prepare, self.retain)
        patch = unittest.mock.patch.object(_core, "released_captures", self.take_released)
        patch.start()
        self.addCleanup(patch.stop)
        self.addCleanup(_workspaces._kept.clear)

    def allocate(self, stream, capturing):
        self.made.append((stream, capturing))
        return 1000 * len(self.made), object()

    def prepare(self, address, stream):
        self.prepared.append((address, stream))

    def retain(self, stream, token):
        self.retained[token] = stream

    def take_released(self):
        released, self.released = self.released, []
        return released

    def destroy_graphs(self):
        self.released.extend(self.retained)
        self.retained.clear()

    def test_calls_on_one_stream_share_a_workspace(self):
        first = self.workspaces.take(7, 0)
        self.assertIs(self.workspaces.take(7, 0), first)
        self.assertEqual(self.made, [(7, False)] * 2)  # and a spare

    def test_streams_have_their_own(self):
        self.assertIsNot(self.workspaces.take(7, 0), self.workspaces.take(8, 0))
        self.assertEqual(self.made, [(7, False), (7, False), (8, False)])

    def test_each_is_prepared_once_on_the_stream_that_gets_it_first(self):
        for _ in range(3):
            self.workspaces.take(7, 0)
            self.workspaces.take(8, 0)
            self.workspaces.take(7, 99)
        self.assertEqual(sorted(self.prepared), sorted({(1000 * (i + 1), stream) for i, (stream, _) in
                                                        enumerate(self.made)}))

    def test_a_capture_takes_the_spare_and_shares_it_with_nobody(self):
        eager = self.workspaces.take(7, 0)
        captured = self.workspaces.take(7, 99)
        self.assertIsNot(captured, eager)
        self.assertIs(self.workspaces.take(7, 99), captured)
        self.assertEqual(self.made, [(7, False)] * 2, "the capture has allocated")
        self.assertIs(self.workspaces.take(7, 0), eager)
        self.assertIsNot(self.workspaces.take(7, 100), captured)
        self.assertEqual(sorted(self.retained.values()), [7, 7])

    def test_streams_of_one_capture_have_their_own(self):
        self.workspaces.take(7, 0)
        first = self.workspaces.take(7, 99)
        second = self.workspaces.take(8, 99)
        self.assertIsNot(first, second)
        self.assertEqual(self.made[-1], (8, True), "the spare was taken, so the second stream allocates in the capture")

    def test_without_a_spare_each_call_of_a_capture_allocates_and_prepares(self):
        first = self.workspaces.take(7, 99)
        second = self.workspaces.take(7, 99)
        self.assertIsNot(first, second)
        self.assertEqual(self.made, [(7, True)] * 2)
        self.assertEqual(self.prepared, [(1000, 7), (2000, 7)])
        self.assertEqual(self.retained, {})

    def test_the_next_call_outside_leaves_a_spare_again(self):
        self.workspaces.take(7, 0)
        self.workspaces.take(7, 99)
        self.workspaces.take(7, 0)
        self.workspaces.take(7, 100)
        self.assertEqual(self.made, [(7, False)] * 3)

    def test_workspaces_of_destroyed_graphs_are_used_again(self):
        self.workspaces.take(7, 0)
        captured = self.workspaces.take(7, 99)
        self.destroy_graphs()
        self.assertIs(self.workspaces.take(7, 100), captured)
        self.assertEqual(self.made, [(7, False)] * 2)

    def test_a_graph_keeps_its_workspace_when_the_plan_is_gone(self):
        self.workspaces.take(7, 0)
        address = self.workspaces.take(7, 99)[0]
        self.workspaces = None
        kept = [owner._of_capture[key][0] for owner, key in _workspaces._kept.values()]
        self.assertEqual(kept, [address])
        self.destroy_graphs()
        _workspaces._collect()
        self.assertEqual(_workspaces._kept, {})

    def test_a_capture_that_cannot_be_retained_takes_no_spare(self):
        self.workspaces.take(7, 0)
        with unittest.mock.patch.object(self.workspaces, "_retain", side_effect=RuntimeError("no")):
            with self.assertRaises(RuntimeError):
                self.workspaces.take(7, 99)
        self.assertEqual(_workspaces._kept, {})
        self.workspaces.take(7, 100)
        self.assertEqual(self.made, [(7, False)] * 2)


class OnADevice:
    """An array in CUDA memory that is neither torch's nor NumPy's."""

    def __dlpack_device__(self):
        return 2, 0


class OtherArraysTest(unittest.TestCase):
    def test_calls_go_through_torch_and_back(self):
        arrays = values((1, 4, 1, 64), 1), values((1, 2, 50, 64), 2), values((1, 2, 50, 64), 3)
        given, out = [OnADevice() for _ in range(3)], OnADevice()
        seen = []

        def through_torch(attend, tensors, given_out, return_lse, stream):
            seen.append((*tensors, given_out, return_lse, stream))
            return attend(*arrays, None, None, None, None, 0)  # a stream, so that it must be for CUDA memory

        with unittest.mock.patch.object(_workspaces, "through_torch", through_torch):
            for attend in (kvonce.attend, kvonce.plan(4, 2, 64, 50).attend):
                with self.assertRaisesRegex(ValueError, "^stream: got 0, allowed: None for CPU memory$"):
                    attend(*given, kv_lens=[3], out=out, return_lse=True, stream=5)
        self.assertEqual(seen, [(*given, [3], None, None, out, True, 5)] * 2)

    def test_without_torch_they_are_refused(self):
        with unittest.mock.patch.dict(sys.modules, {"torch": None}):
            with self.assertRaisesRegex(ValueError, "^q: got an object of type OnADevice in CUDA memory without torch"):
                kvonce.attend(*[OnADevice() for _ in range(3)])

    def test_nothing_was_released_here(self):
        self.assertEqual(_core.released_captures(), [])


if __name__ == "__main__":
    unittest.main()
