//! Inputs that many methods take.

use burn::tensor::DType;

use super::{
    case::{Rule, Spec, Values, main, mask},
    rules::ELEMENTWISE,
};

/// One tensor, of any rank and length.
pub fn one(rule: Rule, dtypes: &'static [DType], values: Values) -> Spec {
    Spec::new(rule, dtypes, [main([5, 3], values)])
        .or([main([7], values)])
        .or([main([2, 1, 4, 3], values)])
        .or([main([1], values)])
        .or([main([0, 3], values)])
}

/// Two tensors that broadcast in every way.
pub fn binary(rule: Rule, dtypes: &'static [DType], left: Values, right: Values) -> Spec {
    Spec::new(rule, dtypes, [main([5, 3], left), main([5, 3], right)])
        .or([main([5, 3], left), main([1, 3], right)])
        .or([main([5, 1], left), main([1, 3], right)])
        .or([main([2, 3, 4], left), main([2, 1, 1], right)])
        .or([main([7], left), main([7], right)])
        .or([main([3, 1, 1, 2], left), main([1, 2, 5, 2], right)])
}

/// A tensor, a mask and another tensor.
pub fn broadcast_mask(dtypes: &'static [DType]) -> Spec {
    let value = || main([5, 3], Values::Mixed);
    Spec::new(ELEMENTWISE, dtypes, [value(), mask([5, 3]), main([5, 3], Values::Positive)])
        .or([value(), mask([1, 3]), value()])
        .or([value(), mask([5, 1]), main([1, 3], Values::Positive)])
}

/// One tensor, at least of rank 2 and with a row.
pub fn reductions(rule: Rule, dtypes: &'static [DType], values: Values) -> Spec {
    Spec::new(rule, dtypes, [main([5, 3], values)])
        .or([main([3, 4, 2], values)])
        .or([main([2, 9], values)])
        .or([main([3, 1], values)])
}
