//! Every method with nothing along some dim: each length that a case's inputs have becomes 0 in turn, wherever it occurs.

use burn::tensor::backend::Backend;

use super::case::{Case, Expected, Input};

/// What Flex gets wrong on empty tensors, or does not get at all, and members need not repeat.
const FAULTS: [(&str, &str); 1] =
    [("float_matmul", "Flex reads past its data where one of several matrices is empty and the other is broadcast")];

/// The cases with inputs that are empty, as far as they can be made so.
pub fn cases<B: Backend>(cases: Vec<Case<B>>) -> Vec<Case<B>> {
    let is_sound = |case: &Case<B>| FAULTS.iter().all(|(method, _)| *method != case.method);
    let is_asked = |case: &Case<B>| case.spec.expected == Expected::Result && is_sound(case);
    let emptied = cases.into_iter().filter(is_asked).map(|mut case| {
        case.spec.variants = case.spec.variants.iter().take(2).flat_map(|inputs| variants(inputs)).collect();
        case.spec.dtypes = &case.spec.dtypes[..1];
        case.spec.expected = Expected::Any;
        case
    });
    emptied.filter(|case| !case.spec.variants.is_empty()).collect()
}

/// The inputs without the rows of each length.
fn variants(inputs: &[Input]) -> Vec<Vec<Input>> {
    let mut lengths: Vec<usize> = inputs.iter().flat_map(|input| input.shape.iter().copied()).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let without = |length: usize| {
        let emptied = |input: &Input| {
            let shape = input.shape.iter().map(|&other| if other == length { 0 } else { other }).collect();
            Input { shape, ..input.clone() }
        };
        inputs.iter().map(emptied).collect()
    };
    lengths.into_iter().filter(|&length| length > 1).map(without).collect()
}
