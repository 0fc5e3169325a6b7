#include <onnxruntime/onnxruntime_c_api.h>
