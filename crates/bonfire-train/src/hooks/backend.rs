//! Functions in autodiff's backward pass.

use core::fmt;
use std::sync::Arc;

use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind, OpsPrep, Tracked},
        },
    },
    tensor::{
        backend::{AutodiffBackend, Backend},
        ops::FloatTensor,
    },
};

/// What a backward pass makes of the gradient of an operation's output: that of its input.
pub type BackwardFn<I> = Arc<dyn Fn(FloatTensor<I>) -> FloatTensor<I> + Send + Sync>;

/// An autodiff backend into whose backward pass functions can be put: `Autodiff`, of any backend.
pub trait HookBackend: AutodiffBackend {
    /// What tells tracked tensors apart: clones have one number.
    fn node(tensor: &FloatTensor<Self>) -> u64;

    /// The leaf itself, as an operation of (at least) that order; `hook` is called with its gradient, once.
    ///
    /// What `hook` gives is dropped. The gradient stays with the result of backward, under the returned tensor.
    fn hook(leaf: FloatTensor<Self>, order: usize, hook: BackwardFn<Self::InnerBackend>) -> FloatTensor<Self>;

    /// `output` as a function of `input`, whose backward is `backward`. If nothing tracks `input`, `output` alone.
    fn function(
        input: FloatTensor<Self>,
        output: FloatTensor<Self::InnerBackend>,
        backward: BackwardFn<Self::InnerBackend>,
    ) -> FloatTensor<Self>;
}

impl<I: Backend, C: CheckpointStrategy> HookBackend for Autodiff<I, C>
where
    Self: AutodiffBackend<InnerBackend = I>,
{
    fn node(tensor: &FloatTensor<Self>) -> u64 {
        node::<I, C>(tensor)
    }

    fn hook(leaf: FloatTensor<Self>, order: usize, hook: BackwardFn<I>) -> FloatTensor<Self> {
        let primitive = Self::inner(leaf.clone());
        let anchor = Self::from_inner(primitive.clone());
        hook_leaf::<I, C>(leaf, anchor, primitive, order, hook)
    }

    fn function(input: FloatTensor<Self>, output: FloatTensor<I>, backward: BackwardFn<I>) -> FloatTensor<Self> {
        function::<I, C>(input, output, backward)
    }
}

// These three know the backend's tensor type, which the bound of the impl above hides from the compiler. The bound
// stands there since `Autodiff` asks more of its inner backend where Burn's feature `distributed` is on.

fn node<I: Backend, C: CheckpointStrategy>(tensor: &FloatTensor<Autodiff<I, C>>) -> u64 {
    tensor.node.id.value
}

fn hook_leaf<I: Backend, C: CheckpointStrategy>(
    leaf: FloatTensor<Autodiff<I, C>>,
    mut anchor: FloatTensor<Autodiff<I, C>>,
    primitive: FloatTensor<I>,
    order: usize,
    hook: BackwardFn<I>,
) -> FloatTensor<Autodiff<I, C>> {
    let requirement = leaf.node.requirement;
    // The leaf in all but its order, which the operation's own order follows.
    let node = Arc::get_mut(&mut anchor.node).expect("a tensor just made has a node of its own");
    node.id = leaf.node.id;
    node.requirement = requirement;
    node.order = order;
    let properties = anchor.node.properties.clone();
    let prepared: OpsPrep<Hook, I, Call<I>, C, 1, Tracked> =
        OpsPrep::new([anchor.node], requirement, Hook, properties, Default::default());
    prepared.finish(Call(hook), primitive)
}

fn function<I: Backend, C: CheckpointStrategy>(
    input: FloatTensor<Autodiff<I, C>>,
    output: FloatTensor<I>,
    backward: BackwardFn<I>,
) -> FloatTensor<Autodiff<I, C>> {
    let prepared = Function.prepare::<C>([input.node.clone()]).compute_bound().stateful();
    match prepared {
        OpsKind::Tracked(prepared) => prepared.finish(Call(backward), output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    }
}

/// Gives a gradient away and keeps it.
#[derive(Debug)]
struct Hook;

impl<I: Backend> Backward<I, 1> for Hook {
    type State = Call<I>;

    fn backward(self, ops: Ops<Call<I>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        // Its requirement is a leaf's, so this leaves the gradient where it is.
        let gradient = grads.consume::<I>(&ops.node);
        (ops.state.0)(gradient);
    }
}

/// Makes the gradient of the input of that of the output.
#[derive(Debug)]
struct Function;

impl<I: Backend> Backward<I, 1> for Function {
    type State = Call<I>;

    fn backward(self, ops: Ops<Call<I>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = (ops.state.0)(grads.consume::<I>(&ops.node));
        if let [Some(parent)] = ops.parents {
            grads.register::<I>(parent.id, gradient);
        }
    }
}

struct Call<I: Backend>(BackwardFn<I>);

impl<I: Backend> Clone for Call<I> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<I: Backend> fmt::Debug for Call<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Call")
    }
}
