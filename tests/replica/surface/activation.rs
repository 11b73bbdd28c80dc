//! `ActivationOps`.

use burn::tensor::{Scalar, backend::Backend};

use super::{
    case::{Case, FLOATS, Spec, Values::*, main},
    rules::*,
    tables::{binary, one, reductions},
};

pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut list: Vec<Case<B>> = Vec::new();
    let each = || one(ELEMENTWISE, FLOATS, Mixed).within(8.0);
    cases! { list, each(), |i| Float (i.float()): relu gelu sigmoid log_sigmoid }
    cases! { list, each().note("slope 0.1"), |i| Float (i.float(), Scalar::Float(0.1)): leaky_relu }
    cases! { list, each().note("0.2, 0.5"), |i| Float (i.float(), Scalar::Float(0.2), Scalar::Float(0.5)):
        hard_sigmoid
    }
    let grads = || binary(ELEMENTWISE, FLOATS, Mixed, Mixed).within(16.0);
    cases! { list, grads(), |i| Float (i.float(), i.float()):
        relu_backward gelu_backward sigmoid_backward log_sigmoid_backward
    }
    let slopes = Spec::new(ELEMENTWISE, FLOATS, [main([5, 3, 4], Mixed), main([1, 3, 1], Mixed)])
        .or([main([5, 3], Mixed), main([1, 1], Mixed)])
        .within(2.0);
    cases! { list, slopes.clone(), |i| Float (i.float(), i.float()): prelu }
    let along = |note| reductions(ALONG, FLOATS, Mixed).within(16.0).note(note);
    cases! { list, along("dim 0"), |i| Float (i.float(), 0): softmax log_softmax softmin }
    cases! { list, along("dim 1"), |i| Float (i.float(), 1): softmax log_softmax softmin }
    list
}
