"""llama-cpp-python's ggml with kvonce's device in it, for every test of this folder."""
import llama_cpp.llama_cpp
from ggml_ops import Ggml
from kvonce import ggml as kvonce_ggml

LIBRARY = kvonce_ggml.load()
GGML = Ggml(llama_cpp.llama_cpp._lib)
DEVICE = GGML.backend_dev_by_name(b"kvonce")
CPU = GGML.backend_dev_by_name(b"CPU")
