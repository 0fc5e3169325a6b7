import COnnxRuntime
import Foundation

/// The functions of the C API, of the version that its header describes.
let api: OrtApi = {
    guard let table = OrtGetApiBase()?.pointee.GetApi(UInt32(ORT_API_VERSION)) else {
        fatalError("the ONNX Runtime library is older than its header")
    }
    return table.pointee
}()

/// Throws what a call of the C API says went wrong, as the Objective-C interface does: an NSError.
func check(_ status: OrtStatusPtr?) throws {
    guard let status else { return }
    defer { api.ReleaseStatus(status) }
    let text = api.GetErrorMessage(status).map { String(cString: $0) } ?? "no reason given"
    let code = Int(api.GetErrorCode(status).rawValue)
    throw failure(text, code: code)
}

/// An error as the Objective-C interface makes them.
func failure(_ text: String, code: Int = 1) -> NSError {
    NSError(domain: "onnxruntime", code: code, userInfo: [NSLocalizedDescriptionKey: text])
}

/// ort_env.h: the runtime's version.
public func ORTVersion() -> String! {
    OrtGetApiBase()?.pointee.GetVersionString().map { String(cString: $0) }
}
