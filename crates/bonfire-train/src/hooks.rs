//! Gradients are handed over while backward still runs: hooks on the parameters of a copy of the model.
//!
//! Autodiff runs its operations by descending *order*, an operation's distance from the leaves, so a leaf comes last. A
//! hooked parameter is an identity operation on the leaf that pretends to be further away: the later a parameter comes
//! in the model, the further. Backward then reaches it as soon as everything that uses it is done:
//!
//! ```text
//! forward   w0 -> act0 -> w1 -> act1 -> w2 -> loss
//! backward  loss, w2 handed over, act1, w1 handed over, act0, w0 handed over
//! ```
//!
//! The gradients come back to the caller as ever, under the parameters' own ids; the hook gets a handle to the same
//! values. An order that was guessed wrong costs overlap, never a gradient. One thing can differ from a model without
//! hooks: a tensor with three or more uses in branches beside each other may have its gradient summed in another order.

mod backend;
mod compare;

use core::{any::Any, fmt, mem};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
};

use burn::{
    module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{
        Tensor, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
        ops::FloatTensor,
    },
};

pub use backend::{BackwardFn, HookBackend};
use compare::Compare;

use crate::GradientSink;

/// Orders between two parameters: the operations that may lie between them before a hook comes late.
const SPACING: usize = 64;

/// How a backend's parameters are hooked, for code that knows no more than `B: AutodiffBackend`.
#[derive(Debug)]
pub struct Hooks<B: AutodiffBackend> {
    node: fn(&FloatTensor<B>) -> u64,
    hook: HookFn<B>,
}

/// [`HookBackend::hook`].
type HookFn<B> = fn(FloatTensor<B>, usize, BackwardFn<<B as AutodiffBackend>::InnerBackend>) -> FloatTensor<B>;

impl<B: AutodiffBackend> Hooks<B> {
    /// The hooks of a backend that has them.
    #[must_use]
    pub fn new() -> Self
    where
        B: HookBackend,
    {
        Self { node: B::node, hook: B::hook }
    }

    /// A copy of the model for one step, whose parameters hand their gradients to `sink` during backward.
    ///
    /// The copy shares running statistics with `model`, as every clone does. Run the step on it, then
    /// [`finish`](HookedModel::finish).
    pub fn hook<M: AutodiffModule<B>>(
        &self,
        model: &M,
        sink: Arc<dyn GradientSink<B::InnerBackend>>,
    ) -> HookedModel<B, M> {
        // Also makes lazy parameters, of which a clone would make its own.
        let mut order = Order::default();
        model.visit(&mut order);
        let watch: Arc<Watch<B::InnerBackend>> = Arc::new(Watch { sink, state: Mutex::new(State::Open(Vec::new())) });
        let hooked = HashMap::new();
        let model = model.clone().map(&mut Mapper { hooks: self, watch: &watch, num_seen: 0, hooked });
        HookedModel { model, ids: order.ids, watch }
    }
}

impl<B: HookBackend> Default for Hooks<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: AutodiffBackend> Clone for Hooks<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: AutodiffBackend> Copy for Hooks<B> {}

/// [`Hooks`] of a backend that is named where they are made and not where they are kept.
#[derive(Clone)]
pub struct AnyHooks {
    hooks: Arc<dyn Any + Send + Sync>,
    backend: &'static str,
}

impl AnyHooks {
    /// The hooks of `B`.
    #[must_use]
    pub fn of<B: HookBackend>() -> Self {
        Self { hooks: Arc::new(Hooks::<B>::new()), backend: core::any::type_name::<B>() }
    }

    /// The hooks, if `B` is the backend that they were made for.
    #[must_use]
    pub fn get<B: AutodiffBackend>(&self) -> Option<Hooks<B>> {
        self.hooks.downcast_ref().copied()
    }
}

impl fmt::Debug for AnyHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnyHooks({})", self.backend)
    }
}

/// A copy of a model for one step, whose gradients are handed over during backward.
pub struct HookedModel<B: AutodiffBackend, M> {
    /// The copy.
    pub model: M,
    /// The parameters that want gradients, in the model's order.
    ids: Vec<ParamId>,
    watch: Arc<Watch<B::InnerBackend>>,
}

/// What the hooks of one step did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HookReport {
    /// The parameters whose gradients were handed over, in that order.
    pub fired: Vec<ParamId>,
    /// The parameters without a gradient, in the model's order: backward did not come to them.
    pub missing: Vec<ParamId>,
    /// The parameters whose gradient in the step's result is another than the one handed over, in the model's order.
    ///
    /// So it is after several backward passes in one step, of which a hook sees the first, and where the step changes,
    /// drops or replaces gradients. What was handed over is void then, and the step's result counts.
    pub changed: Vec<ParamId>,
}

impl HookReport {
    /// Whether the gradients handed over are those of the step.
    #[must_use]
    pub const fn holds(&self) -> bool {
        self.changed.is_empty()
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> HookedModel<B, M> {
    /// Ends the step: compares what was handed over with the step's `gradients`. A hook that fires later is ignored.
    ///
    /// Compares on the device, and reads the outcome once for all parameters.
    pub fn finish(self, gradients: &GradientsParams) -> HookReport {
        let handed = self.watch.close();
        let fired: Vec<ParamId> = handed.iter().map(|(id, _)| *id).collect();
        let mut compare = Compare::<B>::new(handed, gradients);
        self.model.visit(&mut compare);
        let changed = compare.changed();
        let seen: HashSet<ParamId> = fired.iter().chain(&changed).copied().collect();
        let missing = self.ids.iter().filter(|id| !seen.contains(id)).copied().collect();
        let changed = self.ids.into_iter().filter(|id| changed.contains(id)).collect();
        HookReport { fired, missing, changed }
    }
}

impl<B: AutodiffBackend, M: fmt::Debug> fmt::Debug for HookedModel<B, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookedModel").field("model", &self.model).finish_non_exhaustive()
    }
}

/// What the hooks of one step share.
struct Watch<I: Backend> {
    sink: Arc<dyn GradientSink<I>>,
    state: Mutex<State<I>>,
}

enum State<I: Backend> {
    Open(Vec<(ParamId, FloatTensor<I>)>),
    Closed,
}

impl<I: Backend> Watch<I> {
    fn fire(&self, id: ParamId, gradient: FloatTensor<I>) {
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let State::Open(handed) = &mut *state else { return };
            // Two leaves with one id: the sink has one place for them, and the comparison will tell.
            if handed.iter().any(|(other, _)| *other == id) {
                return;
            }
            handed.push((id, gradient.clone()));
        }
        self.sink.ready(id, gradient);
    }

    fn close(&self) -> Vec<(ParamId, FloatTensor<I>)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match mem::replace(&mut *state, State::Closed) {
            State::Open(handed) => handed,
            State::Closed => Vec::new(),
        }
    }
}

/// The parameters that want gradients, each once.
#[derive(Default)]
struct Order {
    ids: Vec<ParamId>,
    seen: HashSet<ParamId>,
}

impl<B: Backend> ModuleVisitor<B> for Order {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if param.val().is_require_grad() && self.seen.insert(param.id) {
            self.ids.push(param.id);
        }
    }
}

struct Mapper<'a, B: AutodiffBackend> {
    hooks: &'a Hooks<B>,
    watch: &'a Arc<Watch<B::InnerBackend>>,
    num_seen: usize,
    /// By node: a parameter that sits in two places of the model has one gradient.
    hooked: HashMap<u64, FloatTensor<B>>,
}

impl<B: AutodiffBackend> ModuleMapper<B> for Mapper<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let is_trained = tensor.is_require_grad();
        let primitive = match tensor.into_primitive() {
            TensorPrimitive::Float(leaf) if is_trained => {
                let (hooks, watch, num_seen) = (self.hooks, self.watch, &mut self.num_seen);
                let hooked = self.hooked.entry((hooks.node)(&leaf)).or_insert_with(|| {
                    let watch = watch.clone();
                    let hook = move |gradient: FloatTensor<B::InnerBackend>| {
                        watch.fire(id, gradient.clone());
                        gradient
                    };
                    *num_seen += 1;
                    (hooks.hook)(leaf, *num_seen * SPACING, Arc::new(hook))
                });
                TensorPrimitive::Float(hooked.clone())
            }
            other => other,
        };
        Param::from_mapped_value(id, Tensor::from_primitive(primitive), mapper)
    }
}
