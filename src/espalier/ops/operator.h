// SPDX-License-Identifier: Apache-2.0
// Helpers to define operators. Arguments are structs, whose all(given) ties the members in schema order;
// implementations take such structs and single arguments. kKernel adapts a function for the dispatcher,
// call() calls an operator by name, and Differentiated implements autograd.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "espalier/ops/argument.h"

namespace espalier::detail {

using TensorVector = std::vector<at::Tensor>;

/// An undefined tensor is none: how C++ callers and saved variables leave an argument out.
inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

/// Of the shape, dtype and device of `tensor`, undefined where that is: results under the Meta key.
inline at::Tensor meta_like(const at::Tensor& tensor) {
  return tensor.defined() ? at::empty_symint(tensor.sym_sizes(), tensor.options()) : at::Tensor();
}
inline at::Tensor meta_if(bool wanted, const at::Tensor& tensor) {
  return wanted ? meta_like(tensor) : at::Tensor();
}

/// Converts a struct member to the dispatcher's argument.
template <class Member>
const Member& dispatched(const Member& member) {
  return member;
}
inline std::optional<at::Tensor> dispatched(const TensorOrNone& member) {
  return if_defined(member);
}
inline at::TensorList dispatched(const TensorVector& member) {
  return member;
}

/// The type of a member in signatures.
template <class Member>
struct DispatchedAs {
  using Type = std::remove_cvref_t<decltype(dispatched(std::declval<const Member&>()))>;
};
template <class Member>
  requires std::derived_from<Member, at::Tensor>
struct DispatchedAs<Member> {
  using Type = decltype(dispatched(std::declval<const Member&>())) const&;
};

/// Ties the members of an argument struct, or a single argument.
template <class Part>
auto members(Part& part) {
  if constexpr (requires { std::remove_const_t<Part>::all(part); }) {
    return std::remove_const_t<Part>::all(part);
  } else {
    return std::tie(part);
  }
}

/// Sets members from the dispatcher's arguments.
template <class... Members, class... Given>
void assign(const std::tuple<Members&...>& members, const Given&... given) {
  const auto set = [](auto& member, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const at::TensorList&>) {
      member = value.vec();
    } else {
      member = value;
    }
  };
  std::apply([&](Members&... member) { (set(member, given), ...); }, members);
}

template <class Result, class Members>
struct SignatureOfMembers;
template <class Result, class... Members>
struct SignatureOfMembers<Result, std::tuple<Members&...>> {
  using Type = Result(typename DispatchedAs<std::remove_const_t<Members>>::Type...);
};
template <class Result, class... Parts>
using SignatureOf =
    typename SignatureOfMembers<Result, decltype(std::tuple_cat(members(std::declval<Parts&>())...))>::Type;

template <class Result, class... Parts>
SignatureOf<Result, std::decay_t<Parts>...>* signature_of(Result (*)(Parts...));

template <auto kFunction, class Function, class Signature>
struct Kernel;
template <auto kFunction, class Result, class... Parts, class... Given>
struct Kernel<kFunction, Result (*)(Parts...), Result (*)(Given...)> {
  static Result run(Given... given) {
    std::tuple<std::decay_t<Parts>...> parts;
    assign(std::apply([](auto&... part) { return std::tuple_cat(members(part)...); }, parts), given...);
    return std::apply(kFunction, parts);
  }
};

/// The function to register for an implementation with argument structs.
template <auto kFunction>
constexpr auto kKernel = &Kernel<kFunction, decltype(kFunction), decltype(signature_of(kFunction))>::run;

/// Registers implementations of an operator and of its backward.
template <auto kForward, auto kBackward>
void implement(torch::Library& m, const std::string& name) {
  m.impl(name.c_str(), kKernel<kForward>);
  m.impl((name + "_backward").c_str(), kKernel<kBackward>);
}

/// A string as a template argument.
template <size_t kSize>
struct Name {
  char text[kSize];
  constexpr Name(const char (&given)[kSize]) { std::copy_n(given, kSize, text); }
};

/// Calls the operator espalier::NAME. Argument types must match its schema.
template <Name kName, class Result, class... Parts>
Result call(const Parts&... parts) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow((std::string("espalier::") + kName.text).c_str(), "")
                             .template typed<SignatureOf<Result, Parts...>>();
  return std::apply([](const auto&... given) { return op.call(dispatched(given)...); },
                    std::tuple_cat(members(parts)...));
}

/// A differentiable operator. Subclasses define `differentiable`, the indices of arguments with gradients,
/// and
///   static std::tuple<...> backward(const Recorded&, const variable_list& grads): gradients of these.
template <Name kOperator, class ArgumentsOf, class ResultsOf>
struct Definition {
  static constexpr Name name = kOperator;
  using Arguments = ArgumentsOf;
  using Results = ResultsOf;
  /// Index of the first result without gradient, and of the first result saved for backward.
  static constexpr size_t first_statistic = SIZE_MAX, first_kept = SIZE_MAX;

  static Results forward(const Arguments& given) { return call<kOperator, Results>(given); }
};

/// The saved inputs of a backward pass.
template <class Operator>
struct Recorded {
  typename Operator::Arguments given;
  TensorVector kept;                                           // results
  std::array<bool, Operator::differentiable.size()> wanted{};  // which of the possible gradients are required
};

template <class T>
concept ATensor = std::derived_from<T, at::Tensor>;

/// Saves the arguments of an operator for its backward pass, and restores them.
class Keeper {
 public:
  explicit Keeper(torch::autograd::AutogradContext* context) : context_(context) {}

  template <class Argument>
  void keep(const Argument& argument) {
    if constexpr (ATensor<Argument>) {
      tensors.push_back(argument);
    } else if constexpr (std::is_same_v<Argument, TensorVector>) {
      keep(static_cast<int64_t>(argument.size()));
      tensors.insert(tensors.end(), argument.begin(), argument.end());
    } else {
      next_number() = argument;
    }
  }

  template <class Argument>
  void find(Argument& argument) {
    if constexpr (ATensor<Argument>) {
      argument = tensors[next_++];
    } else if constexpr (std::is_same_v<Argument, TensorVector>) {
      for (int64_t left = next_number().toInt(); left > 0; --left) argument.push_back(tensors[next_++]);
    } else {
      argument = next_number().template to<Argument>();
    }
  }
  TensorVector rest() const { return {tensors.begin() + static_cast<int64_t>(next_), tensors.end()}; }

  TensorVector tensors;

 private:
  c10::IValue& next_number() { return context_->saved_data[std::to_string(numbers_++)]; }

  torch::autograd::AutogradContext* context_;
  size_t next_ = 0;
  int numbers_ = 0;
};

inline TensorVector in_list(const at::Tensor& tensor) {
  return {tensor};
}
inline TensorVector in_list(const TensorVector& list) {
  return list;
}
template <class... Tensors>
TensorVector in_list(const std::tuple<Tensors...>& results) {
  return std::apply([](const auto&... result) { return TensorVector{result...}; }, results);
}

template <class Results>
Results from_list(const TensorVector& list) {
  if constexpr (std::is_same_v<Results, at::Tensor>) {
    return list[0];
  } else {
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return Results{list[i]...};
    }(std::make_index_sequence<std::tuple_size_v<Results>>());
  }
}

/// The autograd function of an operator.
template <class Operator>
class Differentiated : public torch::autograd::Function<Differentiated<Operator>> {
  using Context = torch::autograd::AutogradContext;
  using Arguments = typename Operator::Arguments;
  using Results = typename Operator::Results;

 public:
  /// Registers the operator, and its backward as not differentiable.
  static void define(torch::Library& m) {
    m.impl(Operator::name.text, kKernel<&Differentiated::run>);
    m.impl((std::string(Operator::name.text) + "_backward").c_str(),
           torch::autograd::autogradNotImplementedFallback());
  }

  static Results run(const Arguments& given) {
    return from_list<Results>(
        std::apply([](const auto&... argument) { return Differentiated::apply(dispatched(argument)...); },
                   members(given)));
  }

  template <class... Given>
  static TensorVector forward(Context* context, const Given&... given) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Arguments arguments;
    assign(members(arguments), given...);
    const TensorVector results = in_list(Operator::forward(arguments));
    Keeper keeper(context);
    std::apply([&](const auto&... argument) { (keeper.keep(argument), ...); },
               members(std::as_const(arguments)));
    TensorVector statistics;
    for (size_t i = 0; i < results.size(); ++i) {
      if (i >= Operator::first_kept) keeper.tensors.push_back(results[i]);
      if (i >= Operator::first_statistic) statistics.push_back(results[i]);
    }
    context->save_for_backward(std::move(keeper.tensors));
    context->mark_non_differentiable(statistics);
    context->set_materialize_grads(results.size() == 1);
    return results;
  }

  static TensorVector backward(Context* context, const TensorVector& grads) {
    Recorded<Operator> recorded;
    Keeper keeper(context);
    keeper.tensors = context->get_saved_variables();
    std::apply([&](auto&... argument) { (keeper.find(argument), ...); }, members(recorded.given));
    recorded.kept = keeper.rest();
    set_wanted(context, recorded);
    std::vector<TensorVector> gradients;
    if (std::ranges::any_of(grads, [](const at::Tensor& grad) { return grad.defined(); })) {
      gradients =
          std::apply([](const auto&... gradient) { return std::vector<TensorVector>{in_list(gradient)...}; },
                     Operator::backward(recorded, grads));
    }
    TensorVector result;
    over_arguments(recorded.given, [&](const auto& argument, size_t gradient) {
      const bool is_given = gradient < gradients.size();
      const TensorVector here = is_given ? gradients[gradient] : TensorVector(gradients_of(argument));
      result.insert(result.end(), here.begin(), here.end());
    });
    return result;
  }

 private:
  /// Calls visit(argument, index among differentiable arguments; out of range for others).
  template <class Visit>
  static void over_arguments(const Arguments& given, const Visit& visit) {
    const auto& differentiable = Operator::differentiable;
    size_t number = 0;
    const auto one = [&](const auto& argument) {
      const auto found = std::ranges::find(differentiable, number++) - differentiable.begin();
      visit(argument, static_cast<size_t>(found));
    };
    std::apply([&](const auto&... argument) { (one(argument), ...); }, members(given));
  }

  /// Number of autograd inputs of an argument, and of its gradients.
  template <class Argument>
  static size_t inputs_of(const Argument& argument) {
    if constexpr (std::is_same_v<Argument, TensorVector>) return argument.size();
    if constexpr (std::is_same_v<Argument, TensorOrNone>) return argument.defined() ? 1 : 0;
    return ATensor<Argument> ? 1 : 0;
  }
  template <class Argument>
  static size_t gradients_of(const Argument& argument) {
    return std::is_same_v<Argument, TensorVector> ? inputs_of(argument) : 1;
  }

  static void set_wanted(Context* context, Recorded<Operator>& recorded) {
    size_t input = 0;  // index without absent inputs
    over_arguments(recorded.given, [&](const auto& argument, size_t gradient) {
      for (const size_t end = input + inputs_of(argument); input < end; ++input) {
        if (gradient < recorded.wanted.size()) recorded.wanted[gradient] |= context->needs_input_grad(input);
      }
    });
  }
};

}  // namespace espalier::detail
