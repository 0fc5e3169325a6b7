// A stub of the part of TensorRT's C++ API that the loader uses, with the signatures of TensorRT 10 and later. Its engine
// gives its first input back as every output. The version is what the macros say.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"

#ifndef STUB_VERSION
#define STUB_VERSION 1, 7, 1, 116
#endif

inline std::int32_t stub_version(int part) {
    const std::int32_t parts[] = {STUB_VERSION};
    return parts[part];
}
inline std::int32_t getInferLibMajorVersion() noexcept { return stub_version(0); }
inline std::int32_t getInferLibMinorVersion() noexcept { return stub_version(1); }
inline std::int32_t getInferLibPatchVersion() noexcept { return stub_version(2); }
inline std::int32_t getInferLibBuildVersion() noexcept { return stub_version(3); }

namespace nvinfer1 {

enum class DataType : std::int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64, kINT4 };

struct Dims {
    static constexpr std::int32_t MAX_DIMS{8};
    std::int32_t nbDims;
    std::int64_t d[MAX_DIMS];
};

class ILogger {
public:
    enum class Severity : std::int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
    virtual void log(Severity severity, const char* message) noexcept = 0;
    virtual ~ILogger() = default;
};

class IHostMemory {
public:
    void* data() const noexcept { return const_cast<char*>(text_.data()); }
    std::size_t size() const noexcept { return text_.size(); }
    std::string text_ = "kernels";
};

class IOutputAllocator {
public:
    virtual void* reallocateOutputAsync(const char*, void*, std::uint64_t, std::uint64_t, cudaStream_t) noexcept {
        return nullptr;
    }
    virtual void notifyShape(const char* name, const Dims& dims) noexcept = 0;
    virtual ~IOutputAllocator() = default;
};

class IRuntimeCache {
public:
    IHostMemory* serialize() const noexcept { return new IHostMemory; }
    bool deserialize(const void*, std::size_t) noexcept { return true; }
};

class IRuntimeConfig {
public:
    IRuntimeCache* createRuntimeCache() const noexcept { return new IRuntimeCache; }
    bool setRuntimeCache(const IRuntimeCache&) noexcept { return true; }
};

class IExecutionContext {
public:
    bool setInputShape(const char* name, const Dims& dims) noexcept {
        if (first_.empty()) {
            first_ = name;
        }
        shapes_[name] = dims;
        return true;
    }
    bool setTensorAddress(const char* name, void* data) noexcept {
        addresses_[name] = data;
        return true;
    }
    bool setInputTensorAddress(const char* name, const void* data) noexcept {
        addresses_[name] = data;
        return true;
    }
    bool setOutputAllocator(const char* name, IOutputAllocator* allocator) noexcept {
        allocators_[name] = allocator;
        return true;
    }
    bool enqueueV3(cudaStream_t stream) noexcept {
        const Dims& dims = shapes_[first_];
        std::uint64_t size = 4;
        for (std::int32_t axis = 0; axis < dims.nbDims; ++axis) {
            size *= static_cast<std::uint64_t>(dims.d[axis]);
        }
        for (auto& [name, allocator] : allocators_) {
            std::memcpy(allocator->reallocateOutputAsync(name.c_str(), nullptr, size, 256, stream), addresses_[first_], size);
            allocator->notifyShape(name.c_str(), dims);
        }
        return true;
    }

private:
    std::string first_;
    std::map<std::string, Dims> shapes_;
    std::map<std::string, const void*> addresses_;
    std::map<std::string, IOutputAllocator*> allocators_;
};

class ICudaEngine {
public:
    IExecutionContext* createExecutionContext() noexcept { return new IExecutionContext; }
    IExecutionContext* createExecutionContext(IRuntimeConfig*) noexcept { return new IExecutionContext; }
    IRuntimeConfig* createRuntimeConfig() noexcept { return new IRuntimeConfig; }
    DataType getTensorDataType(const char*) const noexcept { return DataType::kFLOAT; }
    bool isShapeInferenceIO(const char*) const noexcept { return false; }
};

class IRuntime {
public:
    ICudaEngine* deserializeCudaEngine(const void*, std::size_t) noexcept { return new ICudaEngine; }
};

inline IRuntime* createInferRuntime(ILogger&) noexcept { return new IRuntime; }

}  // namespace nvinfer1
