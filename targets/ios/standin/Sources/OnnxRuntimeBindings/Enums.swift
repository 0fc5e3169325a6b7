import COnnxRuntime

/// ort_enums.h
public enum ORTLoggingLevel: Int32 {
    case verbose, info, warning, error, fatal
}

/// ort_enums.h
public enum ORTTensorElementDataType: Int32 {
    case undefined, float, int8, uInt8, int32, uInt32, int64, uInt64, string, bool

    /// The same in the C API.
    var code: ONNXTensorElementDataType {
        switch self {
        case .undefined: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED
        case .float: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
        case .int8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8
        case .uInt8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8
        case .int32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32
        case .uInt32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32
        case .int64: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64
        case .uInt64: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64
        case .string: return ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING
        case .bool: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL
        }
    }

    /// Bytes of one element; 0 where there is no fixed size.
    var bytes: Int {
        switch self {
        case .undefined, .string: return 0
        case .int8, .uInt8, .bool: return 1
        case .float, .int32, .uInt32: return 4
        case .int64, .uInt64: return 8
        }
    }

    static let all: [ORTTensorElementDataType] = [
        .float, .int8, .uInt8, .int32, .uInt32, .int64, .uInt64, .string, .bool,
    ]
}
