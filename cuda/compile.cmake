# Runs a compiler, and fails where it mentions what our kernels must never do, whatever its status:
#   cmake -P cuda/compile.cmake -- <file that it makes> <compiler> <argument>...
#
# To ptxas it is but information that wgmma wait for one another (C7510 to C7518), that it puts waits of
# its own among them (C7520) or that it ignores setmaxnreg (C7508); and spills are warnings. A
# warpgroup.arrive of its own (C7519) costs nothing.
set(forbidden "Potential Performance Loss|warpgroup\\.wait is injected|[Ss]pill|C75(08|1[0-8]|20)")

math(EXPR last "${CMAKE_ARGC} - 1")
foreach(i RANGE 5 ${last})
  list(APPEND command "${CMAKE_ARGV${i}}")
endforeach()
execute_process(COMMAND ${command} OUTPUT_VARIABLE said ERROR_VARIABLE said RESULT_VARIABLE status)
if(said)
  message("${said}")
endif()
if(said MATCHES "${forbidden}")
  file(REMOVE "${CMAKE_ARGV4}") # or it would count as made
  message(FATAL_ERROR "${CMAKE_ARGV4}: ${CMAKE_MATCH_0}")
elseif(NOT status EQUAL 0)
  message(FATAL_ERROR "${CMAKE_ARGV4}: the compiler ended with ${status}")
endif()
