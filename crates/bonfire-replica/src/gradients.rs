//! How tensors were shared that something was picked out of: their gradients start from zeros, which lie nowhere.
//!
//! The backward pass of a cross entropy puts a small gradient, which may be at home, into zeros of the shape of the
//! logits. With nothing else to go by that would be done at home, for all rows, and then cut for the members.

use std::{cell::RefCell, collections::VecDeque};

use bonfire_placement::Placement;
use burn_backend::{Shape, TensorMetadata};

use crate::{Member, ReplicaTensor, value::Kind};

/// A shape that some tensor of a group had, and where that tensor's parts were.
struct Remembered {
    group: u16,
    shape: Shape,
    placement: Placement,
}

/// Of one thread: more shapes than a model has of such tensors. Older ones are forgotten, at the cost of an exchange.
const MAX_SHAPES: usize = 64;

thread_local! {
    /// The calling thread's own, so that what others do never decides where a gradient is computed.
    static REMEMBERED: RefCell<VecDeque<Remembered>> = const { RefCell::new(VecDeque::new()) };
}

/// Keeps in mind how the members share `tensor`, if they do.
pub(crate) fn remember<B: Member, K: Kind<B>>(tensor: &ReplicaTensor<B, K>) {
    let placement @ Placement::Shard { .. } = tensor.placement() else { return };
    let (group, shape) = (tensor.device_ref().group.index, tensor.shape());
    REMEMBERED.with_borrow_mut(|remembered| {
        let known = remembered.iter().position(|known| known.group == group && known.shape == shape);
        let oldest = || (remembered.len() == MAX_SHAPES).then_some(0);
        if let Some(index) = known.or_else(oldest) {
            remembered.remove(index);
        }
        remembered.push_back(Remembered { group, shape, placement: placement.clone() });
    });
}

/// How the last tensor of the shape of `tensor` was shared, if `tensor` is zeros.
pub(crate) fn remembered<B: Member, K: Kind<B>>(tensor: &ReplicaTensor<B, K>) -> Option<Placement> {
    if !tensor.is_zero_fill() {
        return None;
    }
    let (group, shape) = (tensor.device_ref().group.index, tensor.shape());
    REMEMBERED.with_borrow(|remembered| {
        let known = remembered.iter().find(|known| known.group == group && known.shape == shape);
        known.map(|known| known.placement.clone())
    })
}
