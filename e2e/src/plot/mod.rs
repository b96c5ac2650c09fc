//! What plots of the demo and of the bench are made of: shapes, and axes of numbers.

pub mod axis;
pub mod svg;
