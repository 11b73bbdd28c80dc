//! A transformer that classifies padded texts, and a causal language model with shared embeddings.

use burn::{
    module::Module,
    nn::{
        Dropout, DropoutConfig, Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
        attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask},
        loss::CrossEntropyLossConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{AdamConfig, AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer},
    tensor::{
        Bool, Int, Tensor,
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
const PADDING: i64 = 0;

#[derive(Module, Debug)]
struct TextClassifier<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    transformer: TransformerEncoder<B>,
    output: Linear<B>,
}

impl<B: Backend> TextClassifier<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY as usize, 16).init(device),
            positions: EmbeddingConfig::new(10, 16).init(device),
            transformer: TransformerEncoderConfig::new(16, 32, 2, 2).init(device),
            output: LinearConfig::new(16, 4).init(device),
        }
    }

    /// `[batch, seq]` to `[batch, 4]`.
    fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let [batch_size, seq_length] = tokens.dims();
        let is_padding: Tensor<B, 2, Bool> = tokens.clone().equal_elem(PADDING);
        let positions = Tensor::arange(0..seq_length as i64, &tokens.device());
        let positions = positions.reshape([1, seq_length]).repeat_dim(0, batch_size);
        let x = (self.positions.forward(positions) + self.tokens.forward(tokens)) / 2;
        let x = self.transformer.forward(TransformerEncoderInput::new(x).mask_pad(is_padding));
        self.output.forward(x).slice([0..batch_size, 0..1]).reshape([batch_size, 4])
    }
}

/// `[batch, 8]`, of which each text fills one to eight.
fn texts<B: Backend>(seed: u64, batch_size: usize, device: &B::Device) -> Tensor<B, 2, Int> {
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
        let model = fit::<B, _, _>(journal, TextClassifier::new(device), optimizer, 1e-3, |model, step| {
            loss_fn.forward(model.forward(texts(step, 7, device)), ints(step, [7], 4, device))
        });
        journal.finish::<B, _, 2>(&model, |model| model.forward(texts(99, 5, device)));
    }
}

#[test]
fn a_transformer_classifier_trains_as_on_one_device() {
    equals_one_device::<TrainTextClassifier>(Expected::new(1));
}

#[derive(Module, Debug)]
struct Layer<B: Backend> {
    attention: MultiHeadAttention<B>,
    norm1: LayerNorm<B>,
    widen: Linear<B>,
    narrow: Linear<B>,
    norm2: LayerNorm<B>,
    gelu: Gelu,
    dropout: Dropout,
}

/// Token embeddings are the weights of the output too.
#[derive(Module, Debug)]
struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    layers: Vec<Layer<B>>,
    norm: LayerNorm<B>,
    dropout: Dropout,
}

impl<B: Backend> Layer<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            attention: MultiHeadAttentionConfig::new(16, 4).with_dropout(0.1).init(device),
            norm1: LayerNormConfig::new(16).init(device),
            widen: LinearConfig::new(16, 32).init(device),
            narrow: LinearConfig::new(32, 16).init(device),
            norm2: LayerNormConfig::new(16).init(device),
            gelu: Gelu::new(),
            dropout: DropoutConfig::new(0.1).init(),
        }
    }

    fn forward(&self, x: Tensor<B, 3>, is_later: Tensor<B, 3, Bool>) -> Tensor<B, 3> {
        let input = MhaInput::self_attn(self.norm1.forward(x.clone())).mask_attn(is_later);
        let x = x + self.dropout.forward(self.attention.forward(input).context);
        let wide = self.gelu.forward(self.widen.forward(self.norm2.forward(x.clone())));
        x + self.dropout.forward(self.narrow.forward(wide))
    }
}

impl<B: Backend> Gpt<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY as usize, 16).init(device),
            positions: EmbeddingConfig::new(12, 16).init(device),
            layers: (0..2).map(|_| Layer::new(device)).collect(),
            norm: LayerNormConfig::new(16).init(device),
            dropout: DropoutConfig::new(0.1).init(),
        }
    }

    /// `[batch, seq]` to logits `[batch, seq, vocabulary]`.
    fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [batch_size, seq_length] = tokens.dims();
        let device = tokens.device();
        // One row of positions for all items.
        let positions = Tensor::arange(0..seq_length as i64, &device).reshape([1, seq_length]);
        let x = self.tokens.forward(tokens) + self.positions.forward(positions);
        let is_later = generate_autoregressive_mask(batch_size, seq_length, &device);
        let x = self.dropout.forward(x);
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x, is_later.clone()));
        self.norm.forward(x).matmul(self.tokens.weight.val().transpose().unsqueeze())
    }

    fn loss(&self, texts: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let [batch_size, length] = texts.dims();
        let inputs = texts.clone().slice([0..batch_size, 0..length - 1]);
        let targets = texts.slice([0..batch_size, 1..length]);
        let logits: Tensor<B, 2> = self.forward(inputs).flatten(0, 1);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets.flatten(0, 1))
    }
}

struct TrainGpt;

impl Program for TrainGpt {
    /// Two micro steps are accumulated for each update.
    fn train<B: AutodiffBackend>(device: &B::Device, journal: &mut Journal) {
        let mut model = Gpt::<B>::new(device);
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
