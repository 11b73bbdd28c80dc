//! Every optimizer of burn-optim, on one small model.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::{
        AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, LBFGSConfig, LineSearchFn, MuonConfig,
        Optimizer, RmsPropConfig, SgdConfig, decay::WeightDecayConfig, momentum::MomentumConfig,
    },
    tensor::{
        ElementConversion, Tensor,
        activation::tanh,
        backend::{AutodiffBackend, Backend},
    },
};

use super::{
    data::{floats, ints},
    journal::{Journal, NUM_STEPS, Program, fit},
    parity::{Expected, equals_one_device},
};

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    /// Muon knows matrices only, so biases are left out for it.
    fn new(has_bias: bool, device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(6, 8).with_bias(has_bias).init(device),
            output: LinearConfig::new(8, 4).with_bias(has_bias).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.output.forward(tanh(self.hidden.forward(x)))
    }

    fn loss(&self, step: u64) -> Tensor<B, 1> {
        let device = self.devices().remove(0);
        let logits = self.forward(floats(step, [9, 6], &device));
        CrossEntropyLossConfig::new().init(&device).forward(logits, ints(step, [9], 4, &device))
    }
}

fn train<B: AutodiffBackend, O: Optimizer<Mlp<B>, B>>(
    optimizer: O,
    learning_rate: f64,
    has_bias: bool,
    device: &B::Device,
    journal: &mut Journal,
) {
    let model = fit::<B, _, _>(journal, Mlp::new(has_bias, device), optimizer, learning_rate, Mlp::loss);
    journal.finish::<B, _, 2>(&model, |model| model.forward(floats(99, [5, 6], device)));
}

/// Tests that train with an optimizer: `name: Program, config, learning rate, has bias, expected`.
macro_rules! optimizers {
    ($($name:ident: $program:ident, $config:expr, $learning_rate:literal, $has_bias:literal, $expected:expr;)*) => {$(
        struct $program;

        impl Program for $program {
            fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
                train::<B, _>($config.init(), $learning_rate, $has_bias, device, journal);
            }
        }

        #[test]
        fn $name() {
            equals_one_device::<$program>($expected);
        }
    )*};
}

const PLAIN: Expected = Expected::new(1);

/// Newton and Schulz's method multiplies matrices that are whole on every member. Each product is shared by rows, as all
/// are, and gathered for the next: fourteen of the fifteen products for each of two weights.
const MULTIPLYING: Expected = Expected { others: 28, ..Expected::new(1) };

fn decay() -> Option<WeightDecayConfig> {
    Some(WeightDecayConfig::new(1e-2))
}

optimizers! {
    sgd_steps_as_on_one_device:
        Sgd, SgdConfig::new().with_weight_decay(decay()), 0.1, true, PLAIN;
    sgd_with_nesterov_momentum_steps_as_on_one_device:
        Nesterov, SgdConfig::new().with_momentum(Some(MomentumConfig::new().with_nesterov(true))), 0.1, true, PLAIN;
    adam_steps_as_on_one_device:
        Adam, AdamConfig::new().with_weight_decay(decay()).with_amsgrad(true), 1e-2, true, PLAIN;
    adamw_steps_as_on_one_device:
        AdamW, AdamWConfig::new().with_cautious_weight_decay(true), 1e-2, true, PLAIN;
    adagrad_steps_as_on_one_device:
        AdaGrad, AdaGradConfig::new().with_lr_decay(0.01), 1e-2, true, PLAIN;
    rmsprop_steps_as_on_one_device:
        RmsProp, RmsPropConfig::new().with_centered(true), 1e-3, true, PLAIN;
    adan_steps_as_on_one_device:
        Adan, AdanConfig::new().with_weight_decay(0.01), 1e-2, true, PLAIN;
    muon_steps_as_on_one_device:
        Muon, MuonConfig::new(), 1e-2, false, MULTIPLYING;
}

struct Lbfgs;

impl Program for Lbfgs {
    /// One batch, as the method wants it; each step searches along a line and reads many numbers.
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let mut model = Mlp::<B>::new(true, device);
        let config = LBFGSConfig::new().with_max_iter(1).with_history_size(5);
        let mut optimizer = config.with_line_search_fn(LineSearchFn::None).init::<B>();
        for _ in 0..NUM_STEPS {
            let evaluate = |model: Mlp<B>| {
                let loss = model.loss(0);
                let value = loss.clone().into_scalar().elem();
                (value, GradientsParams::from_grads(loss.backward(), &model))
            };
            let loss;
            (model, loss) = optimizer.step(0.1, model, evaluate);
            journal.step([Tensor::<B::InnerBackend, 1>::from_data([loss], device)]);
        }
        journal.finish::<B, _, 2>(&model, |model| model.forward(floats(99, [5, 6], device)));
    }
}

/// Two losses that it reads, and one list of all gradients. It divides by differences of gradients, which amplifies.
#[test]
fn lbfgs_steps_as_on_one_device() {
    equals_one_device::<Lbfgs>(Expected { tolerance: 1e-3, ..Expected::new(3) });
}
