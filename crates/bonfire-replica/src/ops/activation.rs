use burn_backend::{Scalar, TensorMetadata, ops::ActivationOps, tensor::FloatTensor};

use super::*;
use crate::{Member, Replica};

/// Elementwise, dtype kept.
macro_rules! unary {
    ($($name:ident)*) => {$(
        fn $name(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
            let dtype = tensor.dtype();
            unary(stringify!($name), tensor, dtype, B::$name)
        }
    )*};
}

/// A backward op: what forward kept, and the gradient of its output.
macro_rules! backward {
    ($($name:ident)*) => {$(
        fn $name(kept: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self> {
            let dtype = kept.dtype();
            arithmetic(stringify!($name), kept, grad, dtype, B::$name)
        }
    )*};
}

/// Over a dim that must be whole.
macro_rules! normalised {
    ($($name:ident)*) => {$(
        fn $name(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self> {
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            along(stringify!($name), tensor, dim, length(&shape, dim), dtype, move |x| B::$name(x, dim))
        }
    )*};
}

impl<B: Member> ActivationOps<Self> for Replica<B> {
    unary! {
        relu gelu sigmoid log_sigmoid
    }

    backward! {
        relu_backward gelu_backward sigmoid_backward log_sigmoid_backward
    }

    normalised! {
        softmax log_softmax softmin
    }

    fn leaky_relu(tensor: FloatTensor<Self>, negative_slope: Scalar) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        unary("leaky_relu", tensor, dtype, move |x| B::leaky_relu(x, negative_slope))
    }

    fn hard_sigmoid(tensor: FloatTensor<Self>, alpha: Scalar, beta: Scalar) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        unary("hard_sigmoid", tensor, dtype, move |x| B::hard_sigmoid(x, alpha, beta))
    }

    fn prelu(tensor: FloatTensor<Self>, alpha: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = tensor.dtype();
        arithmetic("prelu", tensor, alpha, dtype, B::prelu)
    }
}
