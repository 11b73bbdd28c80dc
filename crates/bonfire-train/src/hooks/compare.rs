//! Whether gradients that were handed over are those that a step gave.

use std::collections::{HashMap, HashSet};

use burn::{
    module::{ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{
        Bool, Tensor, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
        ops::FloatTensor,
    },
};

/// Compares what was handed over with what the step gave.
pub(super) struct Compare<'a, B: AutodiffBackend> {
    handed: HashMap<ParamId, FloatTensor<B::InnerBackend>>,
    gradients: &'a GradientsParams,
    seen: HashSet<ParamId>,
    changed: HashSet<ParamId>,
    pending: Vec<Pending<'a, B::InnerBackend>>,
}

/// A comparison on its way.
struct Pending<'a, I: Backend> {
    id: ParamId,
    /// Whether any element differs, on the device. A NaN differs from itself.
    differs: Tensor<I, 1, Bool>,
    /// Whether the bits are the same after all.
    is_same: Box<dyn FnOnce() -> bool + 'a>,
}

impl<'a, B: AutodiffBackend> Compare<'a, B> {
    pub(super) fn new(handed: Vec<(ParamId, FloatTensor<B::InnerBackend>)>, gradients: &'a GradientsParams) -> Self {
        let (seen, changed) = (HashSet::new(), HashSet::new());
        Self { handed: handed.into_iter().collect(), gradients, seen, changed, pending: Vec::new() }
    }

    /// The parameters with another gradient.
    pub(super) fn changed(self) -> HashSet<ParamId> {
        let Self { mut changed, pending, .. } = self;
        let (mut flags, mut others) = (Vec::new(), Vec::new());
        for Pending { id, differs, is_same } in pending {
            flags.push(differs);
            others.push((id, is_same));
        }
        if flags.is_empty() {
            return changed;
        }
        let differs: Vec<bool> = Tensor::cat(flags, 0).into_data().iter::<bool>().collect();
        for ((id, is_same), differs) in others.into_iter().zip(differs) {
            if differs && !is_same() {
                changed.insert(id);
            }
        }
        changed
    }
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Compare<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let given: Option<Tensor<B::InnerBackend, D>> = self.gradients.get(param.id);
        let handed = self
            .handed
            .remove(&param.id)
            .map(|primitive| Tensor::<B::InnerBackend, D>::from_primitive(TensorPrimitive::Float(primitive)));
        match (handed, given) {
            (None, None) => {}
            (Some(handed), Some(given)) if handed.dims() == given.dims() && handed.dtype() == given.dtype() => {
                if handed.shape().num_elements() > 0 {
                    let differs = handed.clone().not_equal(given.clone()).any();
                    let is_same = move || handed.into_data().as_bytes() == given.into_data().as_bytes();
                    self.pending.push(Pending { id: param.id, differs, is_same: Box::new(is_same) });
                }
            }
            (Some(_), _) | (None, Some(_)) => {
                self.changed.insert(param.id);
            }
        }
    }
}
