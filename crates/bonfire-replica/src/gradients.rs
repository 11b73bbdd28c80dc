//! How tensors were shared that something was picked out of: their gradients start from zeros, which lie nowhere.
//!
//! The backward pass of a cross entropy puts a small gradient, which may be at home, into zeros of the shape of the
//! logits. With nothing else to go by that would be done at home, for all rows, and then cut for the members.

use std::{any::TypeId, cell::RefCell, collections::VecDeque};

use bonfire_placement::Placement;
use burn_backend::{Shape, TensorMetadata};

use crate::{Member, ReplicaTensor, value::Kind};

/// Of which tensors the last one is remembered.
#[derive(PartialEq)]
struct Key {
    /// Groups are numbered for each backend anew.
    backend: TypeId,
    group: u16,
    shape: Shape,
}

impl Key {
    fn of<B: Member, K: Kind<B>>(tensor: &ReplicaTensor<B, K>) -> Self {
        Self { backend: TypeId::of::<B>(), group: tensor.device_ref().group.index, shape: tensor.shape() }
    }
}

/// Of one thread: more shapes than a model has of such tensors. Older ones are forgotten, at the cost of an exchange.
const MAX_SHAPES: usize = 64;

thread_local! {
    /// The calling thread's own, so that what others do never decides where a gradient is computed.
    static REMEMBERED: RefCell<VecDeque<(Key, Placement)>> = const { RefCell::new(VecDeque::new()) };
}

/// Keeps in mind how the members share `tensor`, out of which something is picked, or that they do not.
pub(crate) fn note<B: Member, K: Kind<B>>(tensor: &ReplicaTensor<B, K>) {
    let placement = tensor.placement();
    let is_shared = matches!(placement, Placement::Shard { .. });
    REMEMBERED.with_borrow_mut(|remembered| {
        if !is_shared && remembered.is_empty() {
            return;
        }
        let key = Key::of(tensor);
        remembered.retain(|(known, _)| *known != key);
        if is_shared {
            if remembered.len() == MAX_SHAPES {
                remembered.pop_front();
            }
            remembered.push_back((key, placement.clone()));
        }
    });
}

/// How the last tensor of the shape of `tensor` was shared that something was picked out of, if `tensor` is zeros.
pub(crate) fn remembered<B: Member, K: Kind<B>>(tensor: &ReplicaTensor<B, K>) -> Option<Placement> {
    if !tensor.is_zero_fill() {
        return None;
    }
    let key = Key::of(tensor);
    REMEMBERED.with_borrow(|remembered| {
        let known = remembered.iter().find(|(known, _)| *known == key);
        known.map(|(_, placement)| placement.clone())
    })
}
