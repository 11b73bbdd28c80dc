//! A replica's tensors as handles of Burn's intermediate representation.

use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_ir::{BackendIr, HandleKind, TensorHandle};

use crate::{Member, Replica};

/// A handle is the whole tensor: whoever holds one holds a placement, never a member's part.
///
/// # Panics
///
/// The conversions from a handle, if it is of another kind.
impl<B: Member> BackendIr for Replica<B> {
    type Handle = HandleKind<Self>;

    fn float_tensor(handle: TensorHandle<Self::Handle>) -> FloatTensor<Self> {
        match handle.handle {
            HandleKind::Float(tensor) => tensor,
            other => wrong_kind("float", &other),
        }
    }

    fn int_tensor(handle: TensorHandle<Self::Handle>) -> IntTensor<Self> {
        match handle.handle {
            HandleKind::Int(tensor) => tensor,
            other => wrong_kind("int", &other),
        }
    }

    fn bool_tensor(handle: TensorHandle<Self::Handle>) -> BoolTensor<Self> {
        match handle.handle {
            HandleKind::Bool(tensor) => tensor,
            other => wrong_kind("bool", &other),
        }
    }

    fn quantized_tensor(handle: TensorHandle<Self::Handle>) -> QuantizedTensor<Self> {
        match handle.handle {
            HandleKind::Quantized(tensor) => tensor,
            other => wrong_kind("quantized", &other),
        }
    }

    fn float_tensor_handle(tensor: FloatTensor<Self>) -> Self::Handle {
        HandleKind::Float(tensor)
    }

    fn int_tensor_handle(tensor: IntTensor<Self>) -> Self::Handle {
        HandleKind::Int(tensor)
    }

    fn bool_tensor_handle(tensor: BoolTensor<Self>) -> Self::Handle {
        HandleKind::Bool(tensor)
    }

    fn quantized_tensor_handle(tensor: QuantizedTensor<Self>) -> Self::Handle {
        HandleKind::Quantized(tensor)
    }
}

fn wrong_kind<B: Member>(wanted: &str, found: &HandleKind<Replica<B>>) -> ! {
    panic!("a handle of kind {} was used as one of kind {wanted}", found.name())
}
