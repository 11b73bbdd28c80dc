//! Every method with nothing along some dim: each length that a case's inputs have becomes 0 in turn, wherever it occurs.

use burn::tensor::backend::Backend;

use super::case::{Case, Expected, Input};

/// Methods that go to Flex's product of several matrices. It reads past its data, or fails with a signal, where one of them is
/// empty: of these only products of two matrices are asked for.
const PRODUCTS: [&str; 6] =
    ["float_matmul", "int_matmul", "q_matmul", "linear", "linear_x_backward", "linear_weight_backward"];

/// Flex calls the largest of no floats an infinity; a replica says that there is none.
const EXTREMES: [&str; 3] = ["float_max", "float_min", "float_max_abs"];

/// Methods of items with space: without a filter, or space to put it, Flex fails or never ends. Only the items may be none.
const SPATIAL: [&str; 9] =
    ["conv", "deform", "unfold4d", "avg_pool", "adaptive", "max_pool", "interpolate", "float_grid", "attention"];

/// The cases with inputs that are empty, as far as they can be made so.
pub fn cases<B: Backend>(cases: Vec<Case<B>>) -> Vec<Case<B>> {
    let is_asked = |case: &Case<B>| case.spec.expected == Expected::Result && !EXTREMES.contains(&case.method);
    let emptied = cases.into_iter().filter(is_asked).map(|mut case| {
        let is_spatial = SPATIAL.iter().any(|prefix| case.method.starts_with(prefix));
        let is_product = PRODUCTS.contains(&case.method);
        let is_sound = |inputs: &&Vec<Input>| !is_product || inputs.iter().all(|input| input.shape.len() <= 2);
        let sound = case.spec.variants.iter().filter(is_sound);
        case.spec.variants = match is_spatial {
            true => sound.map(|inputs| without_items(inputs)).collect(),
            false => sound.flat_map(|inputs| variants(inputs)).collect(),
        };
        case.spec.dtypes = &case.spec.dtypes[..1];
        case.spec.expected = Expected::Any;
        case
    });
    emptied.filter(|case| !case.spec.variants.is_empty()).collect()
}

/// The inputs without the items of the first one.
fn without_items(inputs: &[Input]) -> Vec<Input> {
    let mut emptied = inputs.to_vec();
    // Not a bias that happens to be as long.
    let num_items = inputs[0].shape[0];
    for input in emptied.iter_mut().filter(|input| input.shape.len() > 1 && input.shape[0] == num_items) {
        input.shape[0] = 0;
    }
    emptied
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
