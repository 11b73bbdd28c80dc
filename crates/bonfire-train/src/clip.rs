//! Clipping by the norm of all gradients together, once they are those of all ranks.

use core::marker::PhantomData;

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor, backend::AutodiffBackend},
};

/// Scales gradients so that the L2 norm of all of them together is at most `max_norm`; gives that norm before.
///
/// To be called with the gradients of a whole window: those of a rank or a micro step alone have another norm. Burn's
/// own clipping by norm, which an optimizer does, takes each parameter by itself. Norm and scale are computed in f64 on
/// the host from one number a parameter; a norm that is not finite leaves the gradients as they are.
///
/// Source: R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of training recurrent neural networks", 2013, section
/// 3.2.
pub fn clip_by_global_norm<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    gradients: GradientsParams,
    max_norm: f64,
) -> (GradientsParams, f64) {
    let mut squares = Squares::<B> { gradients, sum: 0.0, backend: PhantomData };
    model.visit(&mut squares);
    let Squares { gradients, sum, .. } = squares;
    let norm = sum.sqrt();
    if !norm.is_finite() || norm <= max_norm {
        return (gradients, norm);
    }
    let mut scaled =
        Scaled::<B> { gradients, factor: max_norm / norm, scaled: GradientsParams::new(), backend: PhantomData };
    model.visit(&mut scaled);
    (scaled.scaled, norm)
}

struct Squares<B> {
    gradients: GradientsParams,
    sum: f64,
    backend: PhantomData<B>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Squares<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.gradients.remove::<B::InnerBackend, D>(param.id) {
            let wide = match gradient.dtype() {
                // A sum of squares soon is too large for them, and too coarse.
                DType::F16 | DType::BF16 => gradient.clone().cast(FloatDType::F32),
                _ => gradient.clone(),
            };
            self.gradients.register(param.id, gradient);
            self.sum += wide.square().sum().into_data().iter::<f64>().sum::<f64>();
        }
    }
}

struct Scaled<B> {
    gradients: GradientsParams,
    factor: f64,
    scaled: GradientsParams,
    backend: PhantomData<B>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Scaled<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = self.gradients.remove::<B::InnerBackend, D>(param.id) {
            self.scaled.register(param.id, gradient * self.factor);
        }
    }
}
