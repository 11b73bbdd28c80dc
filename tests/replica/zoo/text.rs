//! A transformer that classifies padded texts, and a causal language model with shared embeddings.

use bonfire_tests::text::{Gpt, PADDING, TextClassifier, TextConfig};
use burn::{
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamConfig, AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer},
    tensor::{
        Int, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use super::{
    data::ints,
    journal::{Journal, NUM_STEPS, Program, fit},
    parity::{Expected, equals_one_device},
};

/// A key's bias moves all scores of a query alike, so its true gradient is zero. Adam divides what rounding leaves of it
/// by its own size, and with the default of 1e-8 both runs would step at random, each its own way.
const EPSILON: f32 = 1e-4;

const VOCABULARY: u64 = 20;
pub const CONFIG: TextConfig = TextConfig {
    vocabulary: VOCABULARY as usize,
    max_length: 12,
    width: 16,
    num_heads: 2,
    num_layers: 2,
    dropout: 0.1,
};

/// `[batch, 8]`, of which each text fills one to eight.
pub fn texts<B: Backend>(seed: u64, batch_size: usize, device: &B::Device) -> Tensor<B, 2, Int> {
    let tokens = ints::<B, 2>(seed, [batch_size, 8], VOCABULARY - 1, device) + 1;
    let lengths = ints::<B, 2>(seed + 1, [batch_size, 1], 8, device) + 1;
    let positions = Tensor::arange(0..8, device).reshape([1, 8]);
    tokens.mask_fill(positions.expand([batch_size, 8]).greater_equal(lengths.expand([batch_size, 8])), PADDING)
}

struct TrainTextClassifier;

impl Program for TrainTextClassifier {
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let loss_fn = CrossEntropyLossConfig::new().init(device);
        let optimizer = AdamConfig::new().with_epsilon(EPSILON).init();
        let model = fit::<B, _, _>(journal, TextClassifier::new(&CONFIG, device), optimizer, 1e-3, |model, step| {
            loss_fn.forward(model.forward(texts(step, 7, device)), ints(step, [7], 4, device))
        });
        journal.finish::<B, _, 2>(&model, |model| model.forward(texts(99, 5, device)));
    }
}

#[test]
fn a_transformer_classifier_trains_as_on_one_device() {
    equals_one_device::<TrainTextClassifier>(Expected::new(1));
}

struct TrainGpt;

impl Program for TrainGpt {
    /// Two micro steps are accumulated for each update.
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let mut model = Gpt::<B>::new(&TextConfig { num_heads: 4, ..CONFIG }, device);
        let mut optimizer = AdamWConfig::new().with_epsilon(EPSILON).with_weight_decay(0.01).init();
        let mut accumulator = GradientsAccumulator::new();
        for step in 0..NUM_STEPS {
            let losses = [0, 1].map(|micro_step| {
                let loss = model.loss(ints(2 * step + micro_step, [5, 9], VOCABULARY, device)) / 2.0;
                accumulator.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
                loss
            });
            model = optimizer.step(1e-3, model, accumulator.grads());
            journal.step(losses);
        }
        journal.finish_optimizer::<B, Gpt<B>, _>(&optimizer, device);
        journal.finish::<B, _, 3>(&model, |model| model.forward(ints(99, [5, 8], VOCABULARY, device)));
    }
}

#[test]
fn a_gpt_trains_as_on_one_device() {
    equals_one_device::<TrainGpt>(Expected::new(1));
}
