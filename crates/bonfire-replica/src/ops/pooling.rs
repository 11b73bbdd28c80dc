//! Pooling and other spatial operations that leave batch and channels apart.

use bonfire_placement::{Role, Yield};
use burn_backend::{DType, MetadataError, Shape, TensorMetadata, ops::conv::calculate_pool_output_shape};

use super::*;
use crate::{
    Member, ReplicaTensor,
    value::{Float, Int},
};

/// The dims that they share, preferred first.
pub(super) const BATCH_OR_CHANNELS: [usize; 2] = [0, 1];

pub(super) fn resized(shape: Shape, [height, width]: [usize; 2]) -> Result<Shape, MetadataError> {
    with_length(with_length(shape, 2, height)?, 3, width)
}

/// The shape of a pooling's result; `None` if the window is larger than the padded input, of which backends think
/// differently.
pub(super) fn pooled<const N: usize>(
    shape: &Shape,
    kernel_size: [usize; N],
    stride: [usize; N],
    padding: [usize; N],
    dilation: [usize; N],
    ceil_mode: bool,
) -> Option<Result<Shape, MetadataError>> {
    let window = |index: usize| dilation[index] * (kernel_size[index] - 1) + 1;
    let fits = (0..N).all(|index| length(shape, index + 2) + 2 * padding[index] >= window(index));
    fits.then(|| calculate_pool_output_shape(shape, &kernel_size, &stride, &padding, &dilation, ceil_mode))
}

pub(super) fn pooled_spec(shape: Option<Result<Shape, MetadataError>>, dtype: DType) -> Spec {
    shape.map_or(Spec::Unknown, |shape| Spec::inferred(shape, dtype))
}

/// Pooling and other spatial ops that leave batch and channels apart.
pub(super) fn pool<B: Member>(
    name: &'static str,
    x: ReplicaTensor<B, Float>,
    shape: Option<Result<Shape, MetadataError>>,
    body: impl Fn(B::FloatTensorPrimitive) -> B::FloatTensorPrimitive + Send + Sync + 'static,
) -> ReplicaTensor<B, Float> {
    let spec = pooled_spec(shape, x.dtype());
    let op = batch_shared(BATCH_OR_CHANNELS.into(), vec![Role::Split], vec![Yield::Split]);
    apply(Call::light(name), (x,), |_| (Rule::new(op), spec), move |(x,), _| body(x))
}

pub(super) fn pool_with_indices<B: Member>(
    name: &'static str,
    x: ReplicaTensor<B, Float>,
    shape: Option<Result<Shape, MetadataError>>,
    body: impl Fn(B::FloatTensorPrimitive) -> (B::FloatTensorPrimitive, B::IntTensorPrimitive) + Send + Sync + 'static,
) -> (ReplicaTensor<B, Float>, ReplicaTensor<B, Int>) {
    let mut one_plane = x.shape();
    one_plane.iter_mut().take(2).for_each(|length| *length = 1);
    let indices_dtype = index_dtype(name, &x, one_plane, |x| body(x).1.dtype());
    let specs = (pooled_spec(shape.clone(), x.dtype()), pooled_spec(shape, indices_dtype));
    let op = batch_shared(BATCH_OR_CHANNELS.into(), vec![Role::Split], vec![Yield::Split, Yield::Split]);
    apply(Call::light(name), (x,), |_| (Rule::new(op), specs), move |(x,), _| body(x))
}

pub(super) fn pool_backward<B: Member>(
    name: &'static str,
    x: ReplicaTensor<B, Float>,
    grad: ReplicaTensor<B, Float>,
    body: impl Fn(B::FloatTensorPrimitive, B::FloatTensorPrimitive) -> B::FloatTensorPrimitive + Send + Sync + 'static,
) -> ReplicaTensor<B, Float> {
    let spec = Spec::new(x.shape(), x.dtype());
    let op = batch_shared(BATCH_OR_CHANNELS.into(), vec![Role::Split, Role::Split], vec![Yield::Split]);
    apply(Call::light(name), (x, grad), |_| (Rule::new(op), spec), move |(x, g), _| body(x, g))
}

/// Max pooling's backward op.
pub(super) fn unpool<B: Member>(
    name: &'static str,
    x: ReplicaTensor<B, Float>,
    grad: ReplicaTensor<B, Float>,
    indices: ReplicaTensor<B, Int>,
    body: impl Fn(B::FloatTensorPrimitive, B::FloatTensorPrimitive, B::IntTensorPrimitive) -> B::FloatTensorPrimitive
    + Send
    + Sync
    + 'static,
) -> ReplicaTensor<B, Float> {
    let spec = Spec::new(x.shape(), x.dtype());
    let roles = vec![Role::Split, Role::Split, Role::Split];
    let op = batch_shared(BATCH_OR_CHANNELS.into(), roles, vec![Yield::Split]);
    apply(Call::light(name), (x, grad, indices), |_| (Rule::new(op), spec), move |(x, g, i), _| body(x, g, i))
}
