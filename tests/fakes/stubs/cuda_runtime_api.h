// A stub of the part of CUDA's runtime API that the C++ loader uses: device memory is memory of this process, and the GPU's
// compute capability is what the environment variables STUB_MAJOR and STUB_MINOR say.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>

enum cudaError_t { cudaSuccess = 0, cudaErrorNoDevice = 100 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76 };
using cudaStream_t = struct CUstream_st*;

inline const char* cudaGetErrorString(cudaError_t) { return "no CUDA-capable device is detected"; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const char* text = std::getenv(attribute == cudaDevAttrComputeCapabilityMajor ? "STUB_MAJOR" : "STUB_MINOR");
    *value = text == nullptr ? 0 : std::atoi(text);
    return text == nullptr ? cudaErrorNoDevice : cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = nullptr;
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaMalloc(void** pointer, std::size_t size) {
    *pointer = std::malloc(size);
    return cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) {
    std::free(pointer);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind, cudaStream_t) {
    std::memcpy(to, from, size);
    return cudaSuccess;
}
