use burn_backend::{Scalar, TensorMetadata, ops::ActivationOps, tensor::FloatTensor};

use super::*;
use crate::{Member, Replica};

impl<B: Member> ActivationOps<Self> for Replica<B> {
    unary_methods! { FloatTensor:
        relu gelu sigmoid log_sigmoid
    }

    binary_methods! { FloatTensor:
        relu_backward gelu_backward sigmoid_backward log_sigmoid_backward
    }

    along_methods! { FloatTensor:
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
