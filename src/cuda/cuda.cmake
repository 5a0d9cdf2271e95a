# The CUDA backend: planning always, kernels where nvcc 12.8 or newer is found.
target_sources(kvonce_objects PRIVATE cuda/plan.cpp)

if(KVONCE_HAS_CUDA)
  find_package(CUDAToolkit REQUIRED)
  target_sources(kvonce_objects PRIVATE cuda/run.cpp cuda/kernels_bf16.cu cuda/kernels_f16.cu cuda/kernels_generic.cu)
  target_link_libraries(kvonce_objects PUBLIC CUDA::cudart_static)
else()
  target_sources(kvonce_objects PRIVATE cuda/missing.cpp)
endif()
