//! Tensors that are stored smaller than they are: what keeps them so.
//!
//! A backward pass is full of `ones(shape of the activation) * small gradient`. Such a product is stored as small as the
//! gradient, until it meets something that is not: then each member makes its own part of it, and no more.

use bonfire_placement::{Op, Placement, reshape_stored};
use burn_backend::Shape;

use crate::{Member, tensor::Tensor};

/// Whether the operation's result is its one input's storage, repeated more often.
pub(crate) fn repeats_storage<B: Member>(op: &Op, inputs: &[Option<Tensor<B>>]) -> bool {
    let [Some(input)] = inputs else { return false };
    match op {
        Op::Expand { .. } => !is_sharded(input),
        Op::Reshape { .. } | Op::Permute { .. } => input.storage.as_fill().is_some(),
        _ => false,
    }
}

/// Where an operation can run on what is stored, makes it one on tensors of the stored shapes, and gives the shape of
/// its result, which stands for one of shape `output`.
pub(crate) fn store_small<B: Member>(
    op: &mut Op,
    is_elementwise: bool,
    inputs: &mut [Option<Tensor<B>>],
    output: &Shape,
) -> Option<Shape> {
    if inputs.iter().flatten().any(is_sharded) {
        return None;
    }
    let stored = match (&mut *op, &*inputs) {
        (Op::Aligned { .. }, inputs) if is_elementwise => {
            let stored: Vec<Shape> = inputs.iter().flatten().map(Tensor::stored_shape).collect();
            Shape::broadcast_many(stored.iter()).ok()?
        }
        (Op::Permute { axes }, [Some(input)]) if input.is_expanded() => input.stored_shape().permuted(axes).ok()?,
        (Op::Reshape { to }, [Some(input)]) if input.is_expanded() => {
            *to = reshape_stored(&input.shape, &input.stored_shape(), to)?;
            Shape::from(to.clone())
        }
        _ => return None,
    };
    if stored == *output {
        return None;
    }
    for input in inputs.iter_mut().flatten() {
        input.shape = input.stored_shape();
    }
    Some(stored)
}

/// What the rules see as a shard; a sum in parts, or what is at home, can stand for something larger.
fn is_sharded<B: Member>(tensor: &Tensor<B>) -> bool {
    matches!(tensor.storage.placement, Placement::Shard { .. })
}
