//! Tensors that are stored smaller than they are: what keeps them so.
//!
//! A backward pass is full of `ones(shape of the activation) * small gradient`. Such a product is stored as small as the
//! gradient, until it meets something that is not: then each member makes its own part of it, and no more.

use bonfire_placement::{Op, reshape_stored};
use burn_backend::Shape;

use crate::{Member, tensor::Tensor};

/// Whether the operation's result is its one input's storage, repeated more often.
pub(crate) fn repeats_storage<B: Member>(op: &Op, inputs: &[Option<Tensor<B>>]) -> bool {
    let [Some(input)] = inputs else { return false };
    match op {
        Op::Expand { .. } => !input.is_sharded(),
        Op::Reshape { .. } | Op::Permute { .. } => input.storage.as_fill().is_some(),
        _ => false,
    }
}

/// An operation on what is stored.
pub(crate) struct OnStored {
    pub(crate) op: Op,
    /// Of its result, which stands for a larger one.
    pub(crate) shape: Shape,
}

/// Where an operation whose result has shape `output` can run on what is stored: that operation. Its inputs then have the
/// stored shapes too.
pub(crate) fn on_stored<B: Member>(
    op: &Op,
    is_elementwise: bool,
    inputs: &mut [Option<Tensor<B>>],
    output: &Shape,
) -> Option<OnStored> {
    let mut tensors = inputs.iter().flatten();
    // Nothing is stored smaller than no elements: there a length of 1 would stand for 0.
    if output.num_elements() == 0 || !tensors.clone().any(Tensor::is_stored_small) || tensors.any(Tensor::is_sharded) {
        return None;
    }
    let (op, shape) = match (op, &*inputs) {
        (Op::Aligned { .. }, inputs) if is_elementwise => {
            let stored: Vec<Shape> = inputs.iter().flatten().map(Tensor::stored_shape).collect();
            (op.clone(), Shape::broadcast_many(stored.iter()).ok()?)
        }
        (Op::Permute { axes }, [Some(input)]) if input.is_expanded() => {
            (op.clone(), input.stored_shape().permuted(axes).ok()?)
        }
        (Op::Reshape { to }, [Some(input)]) if input.is_expanded() => {
            let to = reshape_stored(&input.shape, &input.stored_shape(), to)?;
            (Op::Reshape { to: to.clone() }, Shape::from(to))
        }
        _ => return None,
    };
    if shape == *output {
        return None;
    }
    for input in inputs.iter_mut().flatten() {
        // Inputs of one shape stay so: not every backend broadcasts in every operation.
        input.shape = match is_elementwise {
            true => input.shape.iter().zip(&shape[..]).map(|(&length, &stored)| length.min(stored)).collect(),
            false => input.stored_shape(),
        };
    }
    Some(OnStored { op, shape })
}
