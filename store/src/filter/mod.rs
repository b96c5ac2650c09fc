//! Filters in the pcap-filter language, for packets of recordings.
//!
//! libpcap compiles (`compile`), the program is verified and runs as everywhere (`vnplug-bpf`), and
//! `plan` finds out from it in which parts of a segment packets that it accepts may be.

mod compile;
mod plan;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

pub use plan::IndexPlan;
pub use vnplug_bpf::Program;

/// A filter for packets of any link type.
#[derive(Debug)]
pub struct Filter {
    expression: String,
    programs: HashMap<u32, Program>,
    /// For Ethernet.
    plan: IndexPlan,
}

impl Filter {
    /// Compiles an expression; an empty one matches every packet.
    ///
    /// # Errors
    /// [`FilterError`] if libpcap does not accept it, or is not there.
    pub fn new(expression: &str) -> Result<Self, FilterError> {
        let program = compile::compile(expression, ETHERNET)?;
        Ok(Self {
            expression: expression.to_owned(),
            plan: IndexPlan::of(&program),
            programs: HashMap::from([(ETHERNET, program)]),
        })
    }

    /// Where packets that it matches may be.
    pub fn plan(&self) -> &IndexPlan {
        &self.plan
    }

    /// Whether it matches a packet; `bytes` is what was captured, `wire_len` its length on the wire.
    ///
    /// # Errors
    /// [`FilterError`] if the expression makes no sense for packets of that link type.
    #[inline]
    pub fn matches(
        &mut self,
        link_type: u32,
        bytes: &[u8],
        wire_len: u32,
    ) -> Result<bool, FilterError> {
        Ok(self.program(link_type)?.run(bytes, wire_len) != 0)
    }

    /// Its program for packets of a link type.
    ///
    /// # Errors
    /// [`FilterError`] if the expression makes no sense for packets of that link type.
    #[inline]
    pub fn program(&mut self, link_type: u32) -> Result<&Program, FilterError> {
        match self.programs.entry(link_type) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(new) => Ok(new.insert(compile::compile(&self.expression, link_type)?)),
        }
    }
}

/// An expression cannot be compiled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FilterError {
    /// libpcap's words.
    Expression(String),
    /// Neither libpcap nor tcpdump can be used; why.
    NoCompiler(String),
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expression(words) => write!(f, "filter: {words}"),
            Self::NoCompiler(why) => write!(
                f,
                "filters are compiled by libpcap, which is not there ({why}): install libpcap or tcpdump"
            ),
        }
    }
}

impl std::error::Error for FilterError {}

/// LINKTYPE_ETHERNET.
const ETHERNET: u32 = 1;

#[cfg(test)]
pub(crate) mod tests;
