//! Parameters that are the same each time, whoever draws random numbers meanwhile.

use burn::{
    backend::Autodiff,
    module::{Module, ModuleMapper, Param},
    tensor::Tensor,
};
use burn_flex::Flex;

type B = Autodiff<Flex>;

/// The model with other values in its trained parameters, no two of which are alike.
pub(super) fn filled<M: Module<B>>(model: M) -> M {
    struct Fill(f32);

    impl ModuleMapper<B> for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            if !param.is_require_grad() {
                return param;
            }
            self.0 += 0.1;
            let start = self.0;
            param.map(|tensor| {
                let shape = tensor.shape();
                let values: Vec<f32> = (0..shape.num_elements()).map(|index| (index as f32 + start).sin()).collect();
                Tensor::<B, 1>::from_floats(values.as_slice(), &tensor.device()).reshape(shape).require_grad()
            })
        }
    }

    model.map(&mut Fill(0.0))
}
