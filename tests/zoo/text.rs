//! A transformer that classifies padded texts, and a causal language model with shared embeddings.

use burn::{
    module::Module,
    nn::{
        Dropout, DropoutConfig, Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
        attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask},
        loss::CrossEntropyLossConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{Bool, Int, Tensor, backend::Backend},
};

/// The token that fills up short texts.
pub const PADDING: i64 = 0;

/// Size of a model of texts.
pub struct TextConfig {
    pub vocabulary: usize,
    pub max_length: usize,
    pub width: usize,
    pub num_heads: usize,
    pub num_layers: usize,
    pub dropout: f64,
}

/// Embeddings, an encoder, and a linear layer on its first token.
#[derive(Module, Debug)]
pub struct TextClassifier<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    transformer: TransformerEncoder<B>,
    output: Linear<B>,
}

impl<B: Backend> TextClassifier<B> {
    pub fn new(config: &TextConfig, device: &B::Device) -> Self {
        let &TextConfig { vocabulary, max_length, width, num_heads, num_layers, dropout } = config;
        Self {
            tokens: EmbeddingConfig::new(vocabulary, width).init(device),
            positions: EmbeddingConfig::new(max_length, width).init(device),
            transformer: TransformerEncoderConfig::new(width, 2 * width, num_heads, num_layers)
                .with_dropout(dropout)
                .init(device),
            output: LinearConfig::new(width, 4).init(device),
        }
    }

    /// `[batch, seq]` to `[batch, 4]`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let [batch_size, seq_length] = tokens.dims();
        let is_padding: Tensor<B, 2, Bool> = tokens.clone().equal_elem(PADDING);
        let positions = Tensor::arange(0..seq_length as i64, &tokens.device());
        let positions = positions.reshape([1, seq_length]).repeat_dim(0, batch_size);
        let x = (self.positions.forward(positions) + self.tokens.forward(tokens)) / 2;
        let x = self.transformer.forward(TransformerEncoderInput::new(x).mask_pad(is_padding));
        self.output.forward(x).slice([0..batch_size, 0..1]).reshape([batch_size, 4])
    }
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
pub struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    positions: Embedding<B>,
    layers: Vec<Layer<B>>,
    norm: LayerNorm<B>,
    dropout: Dropout,
}

impl<B: Backend> Layer<B> {
    fn new(config: &TextConfig, device: &B::Device) -> Self {
        let &TextConfig { width, num_heads, dropout, .. } = config;
        Self {
            attention: MultiHeadAttentionConfig::new(width, num_heads).with_dropout(dropout).init(device),
            norm1: LayerNormConfig::new(width).init(device),
            widen: LinearConfig::new(width, 2 * width).init(device),
            narrow: LinearConfig::new(2 * width, width).init(device),
            norm2: LayerNormConfig::new(width).init(device),
            gelu: Gelu::new(),
            dropout: DropoutConfig::new(dropout).init(),
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
    pub fn new(config: &TextConfig, device: &B::Device) -> Self {
        let &TextConfig { vocabulary, max_length, width, num_layers, dropout, .. } = config;
        Self {
            tokens: EmbeddingConfig::new(vocabulary, width).init(device),
            positions: EmbeddingConfig::new(max_length, width).init(device),
            layers: (0..num_layers).map(|_| Layer::new(config, device)).collect(),
            norm: LayerNormConfig::new(width).init(device),
            dropout: DropoutConfig::new(dropout).init(),
        }
    }

    /// `[batch, seq]` to logits `[batch, seq, vocabulary]`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
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

    /// Of each token given those before it; `texts` is `[batch, seq]`.
    pub fn loss(&self, texts: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let [batch_size, length] = texts.dims();
        let inputs = texts.clone().slice([0..batch_size, 0..length - 1]);
        let targets = texts.slice([0..batch_size, 1..length]);
        let logits: Tensor<B, 2> = self.forward(inputs).flatten(0, 1);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets.flatten(0, 1))
    }
}
