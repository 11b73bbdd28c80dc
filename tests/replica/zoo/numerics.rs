//! Activation checkpointing, and parameters in half precision.

use burn::{
    backend::autodiff::checkpoint::strategy::BalancedCheckpointing,
    module::{Module, ModuleMapper, Param},
    nn::{
        Dropout, DropoutConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig, loss::CrossEntropyLossConfig,
    },
    optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig},
    tensor::{
        FloatDType, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use super::{
    data::{floats, ints},
    journal::{Journal, NUM_STEPS, Program, fit},
    parity::{Expected, equals_one_device, equals_one_device_with},
};

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    input: Linear<B>,
    norm: LayerNorm<B>,
    hidden: Linear<B>,
    output: Linear<B>,
    gelu: Gelu,
    dropout: Dropout,
}

impl<B: Backend> Mlp<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            input: LinearConfig::new(12, 24).init(device),
            norm: LayerNormConfig::new(24).init(device),
            hidden: LinearConfig::new(24, 24).init(device),
            output: LinearConfig::new(24, 5).init(device),
            gelu: Gelu::new(),
            dropout: DropoutConfig::new(0.2).init(),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let x = self.gelu.forward(self.norm.forward(self.input.forward(x)));
        // Elementwise chains are what is computed again in the backward pass.
        let x = self.dropout.forward((self.hidden.forward(x.clone()).exp() + 1.0).log() * 0.5 + x);
        self.output.forward(x)
    }
}

struct TrainMlp;

impl Program for TrainMlp {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let loss_fn = CrossEntropyLossConfig::new().init(device);
        let model = fit::<B, _, _>(journal, Mlp::new(device), AdamConfig::new().init(), 1e-3, |model, step| {
            loss_fn.forward(model.forward(floats(step, [10, 12], device)), ints(step, [10], 5, device))
        });
        journal.finish::<B, _, 2>(&model, |model| model.forward(floats(99, [6, 12], device)));
    }
}

#[test]
fn activations_that_are_computed_again_are_those_of_one_device() {
    equals_one_device_with::<TrainMlp, BalancedCheckpointing>(Expected::new(1));
}

struct TrainWithMasks;

impl Program for TrainWithMasks {
    /// Writes each step's mask down.
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let mut model = LinearConfig::new(6, 30).init::<B>(device);
        let dropout = DropoutConfig::new(0.4).init();
        let mut optimizer = SgdConfig::new().init();
        for step in 0..NUM_STEPS {
            let x = model.forward(floats::<B, 2>(step, [9, 6], device));
            let mask = dropout.forward(x.clone().detach() * 0.0 + 1.0);
            journal.exact(mask.clone().into_data());
            let loss = (x * mask).square().mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.1, model, grads);
            journal.step([loss]);
        }
        journal.finish::<B, _, 2>(&model, |model| model.forward(floats(99, [5, 6], device)));
    }
}

/// CASES 24, over a whole run.
#[test]
fn dropout_masks_on_members_are_those_of_one_device() {
    equals_one_device::<TrainWithMasks>(Expected::new(1));
}

struct Cast(FloatDType);

impl<B: AutodiffBackend> ModuleMapper<B> for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        // Cast outside of the graph, so that the parameter is a leaf of it again.
        param.map(|tensor| Tensor::from_inner(tensor.inner().cast(self.0)).require_grad())
    }
}

fn train_in<B: AutodiffBackend>(dtype: FloatDType, device: &B::Device, journal: &mut Journal) {
    let loss_fn = CrossEntropyLossConfig::new().init(device);
    let model = Mlp::<B>::new(device).map(&mut Cast(dtype));
    let model = fit::<B, _, _>(journal, model, SgdConfig::new().init(), 0.1, |model, step| {
        let logits = model.forward(floats(step, [10, 12], device).cast(dtype));
        loss_fn.forward(logits.cast(FloatDType::F32), ints(step, [10], 5, device))
    });
    for parameters in [&model.input.weight, &model.output.weight] {
        assert_eq!(parameters.val().dtype(), dtype.into());
    }
    // A record of full precision is loaded as f32.
    journal.finish::<B, _, 2>(&model, |model| {
        model.forward(floats(99, [6, 12], device).cast(model.input.weight.val().dtype()))
    });
}

/// The gradients of LayerNorm's two parameters are sums over the batch. In halves a sum is made of the whole: a member's
/// part could overflow, or lose digits, where the whole sum would not. So the members exchange the batch for features, of
/// which each sums its own, and join those for the optimizer.
const HALVES: Expected = Expected { others: 4, ..Expected::new(1) };

struct TrainF16;

impl Program for TrainF16 {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        train_in::<B>(FloatDType::F16, device, journal);
    }
}

/// Eleven bits: a unit in the last place is 1e-3, and twenty steps add a few of them up.
#[test]
fn parameters_in_f16_train_as_on_one_device() {
    equals_one_device::<TrainF16>(Expected { tolerance: 1e-2, ..HALVES });
}

struct TrainBf16;

impl Program for TrainBf16 {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        train_in::<B>(FloatDType::BF16, device, journal);
    }
}

/// Eight bits: a unit in the last place is 8e-3.
#[test]
fn parameters_in_bf16_train_as_on_one_device() {
    equals_one_device::<TrainBf16>(Expected { tolerance: 5e-2, ..HALVES });
}
